"""Where an adapter starts: the model's own keys and values for real tokens, or seeded random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers import PreTrainedModel

from ..attention.readers import KeyValue, Recorder
from ..errors import ForewordError
from ..model.layout import Layout, Site, by_name
from ..model.survey import probe

NORMAL_STD = 0.02
FIRST_ORDINARY_TOKEN = 3  # vocabularies begin with their special tokens


class Start:
    """What a method may start from.

    Args:
        model, layout: the frozen model and its survey.
        init_ids: token ids of the text to start from; None draws ordinary token ids.
        seed: of that draw, and of every random initialisation.
    """

    def __init__(
        self, model: PreTrainedModel, layout: Layout, init_ids: Iterable[int] | Tensor | None, seed: int
    ) -> None:
        self.model = model
        self.layout = layout
        self._init_ids = init_ids
        self.seed = seed

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @property
    def dtype(self) -> torch.dtype:
        """Of the adapter's parameters: fp32, or float64 beside a float64 model."""
        return torch.promote_types(self.model.dtype, torch.float32)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """N(0, std²) numbers of the adapter's own generator, on the CPU."""
        return torch.randn(shape, generator=self.generator, dtype=self.dtype) * std

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """nn.Linear with PyTorch's default U(±1/√inputs), drawn from the adapter's own generator."""
        linear = skip_init(nn.Linear, inputs, outputs, dtype=self.dtype)  # which would draw from the global generator
        for parameter in linear.parameters():
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=self.generator)
        return linear

    def ids(self, length: int) -> Tensor:
        """The first `length` token ids to start from, (1, length)."""
        vocabulary = self.model.config.get_text_config().vocab_size
        if self._init_ids is None:
            low = min(FIRST_ORDINARY_TOKEN, vocabulary - 1)
            return torch.randint(low, vocabulary, (1, length), generator=self.generator)
        try:
            ids = torch.as_tensor(self._init_ids).reshape(1, -1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ForewordError("init_ids must be token ids, a list of integers or a tensor of them") from error
        if ids.shape[1] < length:
            raise ForewordError(f"init_ids has {ids.shape[1]} tokens, fewer than the {length} that the method needs")
        wrong = [number for number in ids[0].tolist() if not (isinstance(number, int) and 0 <= number < vocabulary)]
        if wrong:
            raise ForewordError(f"init_ids holds {wrong[0]}; token ids of this model are 0 … {vocabulary - 1}")
        return ids[:, :length]

    def split(self, count: int, length: int) -> list[Start]:
        """`count` starts, each from the next `length` tokens of the text."""
        pieces = self.ids(count * length).view(count, length)
        return [Start(self.model, self.layout, piece, self.seed) for piece in pieces]

    def key_values(self, sites: list[Site], length: int, init: str) -> dict[Site, KeyValue]:
        """Initial keys (G, l, D_k) and values (G, l, D_v) of each site for init "text", "normal" or "zero"."""
        if init == "text":
            return self._text_key_values(sites, length)
        std = {"normal": NORMAL_STD, "zero": 0.0}[init]
        return {
            site: (
                self.normal(site.num_key_value_heads, length, site.key_dim, std=std),
                self.normal(site.num_key_value_heads, length, site.value_dim, std=std),
            )
            for site in sites
        }

    def _text_key_values(self, sites: list[Site], length: int) -> dict[Site, KeyValue]:
        """The keys and values that the model computes for the text, as if it stood right before position 0."""
        recorder = Recorder()
        self._read_text(length, recorder)
        keys_values = {site: recorder.calls[site.module][1:] for site in sites}  # (1, G, T, D) each
        return {
            site: (_spread(key[0], length), _spread(value[0], length)) for site, (key, value) in keys_values.items()
        }

    def hidden_states(self, sites: list[Site], length: int) -> dict[Site, Tensor]:
        """The rows (l, d) that each site's layer receives for the text."""
        rows: dict[Site, Tensor] = {}

        def keep(site: Site):
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                rows[site] = _spread(by_name(module, args, kwargs)["hidden_states"][0], length)

            return hook

        handles = [site.layer_module.register_forward_pre_hook(keep(site), with_kwargs=True) for site in sites]
        try:
            self._read_text(length, Recorder())
        finally:
            for handle in handles:
                handle.remove()
        return rows

    def _read_text(self, length: int, recorder: Recorder) -> None:
        positions = prefix_positions(self.layout, length)
        placed = {} if positions is None else {"position_ids": positions[None].to(self.model.device)}
        probe(self.model, self.ids(length), foreword=recorder, **placed)


class Blank(Start):
    """Zeros everywhere, for an adapter whose numbers are about to be read from a file."""

    def __init__(self, model: PreTrainedModel, layout: Layout) -> None:
        super().__init__(model, layout, init_ids=None, seed=0)

    def split(self, count: int, length: int) -> list[Start]:
        return [self] * count

    def key_values(self, sites: list[Site], length: int, init: str) -> dict[Site, KeyValue]:
        return super().key_values(sites, length, "zero")

    def hidden_states(self, sites: list[Site], length: int) -> dict[Site, Tensor]:
        return {site: torch.zeros(length, site.hidden_size, dtype=self.dtype) for site in sites}


def _spread(states: Tensor, length: int) -> Tensor:
    """`length` rows of states (…, T, D), evenly spaced: all of a text of that length, some frames of an audio."""
    rows = torch.linspace(0, states.shape[-2] - 1, length, device=states.device).round().long()
    return states[..., rows, :]


def prefix_positions(layout: Layout, length: int) -> Tensor | None:
    """The positions (l,) of prefix tokens of which text position 0 is the successor.

    −l … −1 where keys are rotated (R_{−l} moves a prefix from SHIFT to NOSHIFT, exactly); 0 … l−1 where positions are
    looked up, and the text is shifted by l instead; None where a model takes no positions.
    """
    if not layout.decoder_only:
        return None
    if layout.absolute_positions:
        return torch.arange(length)
    return torch.arange(-length, 0) if layout.rotates else None
