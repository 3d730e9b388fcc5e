"""Remember what enters the first layer that an adapter changes: the layers below it give the same in every epoch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ForewordError
from .model.adapter import Adapter
from .model.blocks import LAYER
from .model.layout import by_name
from .model.survey import probe
from .model.weights import WeightsPart

logger = logging.getLogger(__name__)


class FrozenLayers:
    """The hidden states that enter layer n of a decoder, for every sequence it has read, while `remember` lasts.

    With n the lowest layer that an adapter changes, x_n depends on the tokens alone. A batch whose rows have all been
    seen skips the layers 0 … n−1; their outputs are kept for the real tokens only, in the model's dtype.

    Args:
        adapter: on a causal language model.
        max_bytes: of hidden states. Once they are full, sequences that are not among them are computed as usual.

    Raises:
        ForewordError: the adapter changes the lowest layer, or the layers below it are not a function of the tokens
            (dropout), or a higher layer needs more of them than the hidden states.
    """

    def __init__(self, adapter: Adapter, max_bytes: int) -> None:
        layout = adapter.host.layout
        self.number = _lowest_layer(adapter)
        if self.number == 0:
            methods = " + ".join(method.name for method in adapter.methods)
            raise ForewordError(
                f"cache_frozen: {methods} changes the lowest layer, so nothing below it can be kept; give "
                "`layers` (the top n) to a method, or leave cache_frozen off"
            )
        self.model = adapter.model
        self.stack: nn.Module = layout.stacks[0]
        layers = [self.model.get_submodule(path) for path in layout.layers]
        self.below, self.layer = layers[: self.number], layers[self.number]
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.states: dict[bytes, Tensor] = {}  # key of a sequence → (T, d)
        self._hit: Tensor | None = None  # what enters the layer in this forward: (B, T, d)
        self._keys: list[bytes] = []
        self._real = torch.empty(0)  # (B, T) boolean
        self._in_tuple: dict[nn.Module, bool] = {}
        self._check()

    @contextmanager
    def remember(self) -> Iterator[None]:
        """Within the block, forwards of the model use the hidden states that are kept, and keep new ones."""
        handles = [
            self.stack.register_forward_pre_hook(self._look_up, with_kwargs=True),
            self.layer.register_forward_pre_hook(self._exchange, with_kwargs=True),
        ]
        for layer in self.below:
            layer.forward = partial(self._unless_kept, layer, layer.forward)
        try:
            yield
        finally:
            for layer in self.below:
                del layer.forward
            for handle in handles:
                handle.remove()

    # -----------------------------------------------------------------------------------------------------------------
    # Each forward

    def _look_up(self, stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the decoder: find the states of every row."""
        arguments = by_name(stack, args, kwargs)
        ids: Tensor = arguments["input_ids"]
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        self._real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        placed = ids if positions is None else torch.stack([ids, positions.expand_as(ids)], dim=-1)
        tokens = placed.cpu().numpy()
        real = self._real.cpu().numpy()
        self._keys = [hashlib.sha256(row[seen].tobytes()).digest() for row, seen in zip(tokens, real, strict=True)]
        self._hit = None
        if all(key in self.states for key in self._keys):
            states = torch.cat([self.states[key] for key in self._keys]).to(ids.device)
            self._hit = states.new_zeros(*ids.shape, states.shape[-1])
            self._hit[self._real] = states

    def _unless_kept(self, layer: nn.Module, forward: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of a layer below: nothing, where the states are kept."""
        if self._hit is not None:
            return (hidden_states,) if self._in_tuple[layer] else hidden_states
        output = forward(hidden_states, *args, **kwargs)
        self._in_tuple[layer] = isinstance(output, tuple)
        return output

    def _exchange(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook of the lowest layer that is changed: take the states that are kept, or keep these."""
        states = args[0] if args else kwargs["hidden_states"]
        if self._hit is not None:
            return ((self._hit, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": self._hit})
        for key, row, real in zip(self._keys, states.detach(), self._real, strict=True):
            self._keep(key, row[real])
        return None

    def _keep(self, key: bytes, states: Tensor) -> None:
        size = states.numel() * states.element_size()
        if key in self.states:
            return
        if self.num_bytes + size > self.max_bytes:
            if self.max_bytes:
                logger.warning("cache_frozen is full with %d sequences; the others are computed", len(self.states))
            self.max_bytes = 0  # say it once
            return
        self.states[key] = states.cpu()
        self.num_bytes += size

    def _check(self) -> None:
        """Run the model on a few tokens: twice in training mode below the layer, and once more from what was kept."""
        limit, self.max_bytes = self.max_bytes, 1 << 30
        with self.remember():
            logits = probe(self.model).logits
            kept = probe(self.model).logits
            if not torch.allclose(logits, kept, rtol=1e-3, atol=1e-3):
                raise ForewordError(
                    f"cache_frozen: {type(self.model).__name__} reads more from its lower layers than their hidden "
                    "states; leave cache_frozen off"
                )
            if not torch.equal(self._states_in_training(), self._states_in_training()):
                raise ForewordError(
                    f"cache_frozen: the layers below layer {self.number} are random in training (dropout); leave "
                    "cache_frozen off"
                )
        self.states, self.num_bytes, self.max_bytes = {}, 0, limit

    def _states_in_training(self) -> Tensor:
        """(T, d): what enters the layer for the tokens of the probe, in training mode."""
        self.states = {}
        probe(self.model, training=True)
        return next(iter(self.states.values()))


def _lowest_layer(adapter: Adapter) -> int:
    """The number of the lowest layer that an adapter changes; 0 where it may change the embedding."""
    layers = adapter.host.layout.layers
    if any(isinstance(part, WeightsPart) for part in adapter.parts):
        return 0
    places = [LAYER.match(place.path) for part in adapter.parts for place in part.modules]
    return min(layers.index(place.group()) for place in places if place is not None)
