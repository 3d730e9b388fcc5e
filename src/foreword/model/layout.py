"""Find where a model attends, by running it once on a few tokens and looking.

Nothing here knows the name of an architecture. A module that calls the dispatched attention function is a site; whether it
is self-, cross- or encoder attention shows in the lengths it attends over; the norm in front of it is the module whose output
it was given; its rotary embedding is the module whose output it received as `position_embeddings`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.dispatch import install
from ..attention.readers import KeyValue, Projection, Recorder
from ..errors import ForewordError

Kind = Literal["self", "cross", "encoder"]
ENCODER_TOKENS, DECODER_TOKENS = 5, 3  # different, so that cross-attention shows in the shapes


@dataclass
class Call:
    """One call of a module as it was seen: its arguments by name."""

    module: nn.Module
    arguments: dict[str, Any]


@dataclass(eq=False)
class Site:
    """One attention module of a model.

    Attributes:
        module, path: the module and its dotted name.
        kind: "self", "cross", or "encoder" (self-attention of the encoder of an encoder-decoder).
        layer, layer_module: number of its layer within the stack, and the layer.
        num_heads, num_key_value_heads: H and G.
        key_dim, value_dim: D_k and D_v, per head.
        hidden_size: width d of the module's input.
        norm: the module that normalises the layer's input for this attention; None for post-norm layers.
        reads_layer_input: whether the attention reads the layer's input, through `norm` and nothing else.
        rotary: the call that produced the rotary `position_embeddings`; None where keys aren't rotated.
        call: the call of the attention module itself, as a template for `project`.
    """

    module: nn.Module
    path: str
    kind: Kind
    layer: int
    layer_module: nn.Module
    num_heads: int
    num_key_value_heads: int
    key_dim: int
    value_dim: int
    hidden_size: int
    norm: nn.Module | None
    reads_layer_input: bool
    rotary: Call | None
    call: Call

    @property
    def label(self) -> str:
        """Name of the site in adapter files: independent of the class that wraps the model."""
        return f"{self.kind}.{self.layer}"

    def project(self, hidden: Tensor, positions: Tensor, *, norm: bool) -> KeyValue:
        """The keys and values that this attention makes of hidden states, in cache space.

        The module itself is called, with its attention skipped, so that fused, quantized, offloaded and adapted projections,
        QK-norm and every kind of rotary embedding are the model's own.

        Args:
            hidden: (l, d).
            positions: (l,) integers for the rotary embedding; zeros leave the keys unrotated.
            norm: pass `hidden` through the layer's norm first.

        Returns:
            keys (G, l, D_k) and values (G, l, D_v).
        """
        hidden = hidden[None].to(self.dtype)
        if norm and self.norm is not None:
            hidden = self.norm(hidden)
        arguments = {name: hidden if _is_states(value) else None for name, value in self.call.arguments.items()}
        if self.rotary is not None:
            arguments["position_embeddings"] = _call_rotary(self.rotary, hidden, positions[None])
        if "position_ids" in self.call.arguments:
            arguments["position_ids"] = positions[None]
        projection = Projection()
        self.module(**(arguments | {"foreword": projection}))
        return projection.key[0], projection.value[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.call.arguments["hidden_states"].dtype


@dataclass(eq=False)
class Layout:
    """What attaching needs to know of a model.

    Attributes:
        sites: every attention module that dispatches, in the order in which the model runs them.
        stacks: the models inside the model (decoder, encoder) that take token positions and masks.
        skipped: paths of layers that have no such attention (state-space, convolution, …).
        stateful: some layers carry a recurrent or convolutional state beside attention.
        decoder_only: one causal stack.
        rotates: keys are rotated by their position.
        learned_positions: positions are embedded with the tokens.
    """

    sites: list[Site]
    stacks: list[PreTrainedModel]
    skipped: list[str]
    stateful: bool
    decoder_only: bool
    rotates: bool
    learned_positions: bool
    kinds: dict[str, list[Site]] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = {}
        for site in self.sites:
            self.kinds.setdefault(site.kind, []).append(site)

    def select(self, layers: int | Iterable[int] | str | None, attention: str) -> list[Site]:
        """The sites of the chosen layers and kinds of attention.

        Args:
            layers: None for every layer, n for the top n attention layers of each stack, a list of layer numbers
                (negative ones count from the top), or "upper" for all but the lowest two.
            attention: "all", or kinds joined by "+", for example "self+encoder".
        """
        kinds = ("self", "cross", "encoder") if attention == "all" else tuple(attention.split("+"))
        unknown = [kind for kind in kinds if kind not in ("self", "cross", "encoder")]
        if unknown:
            raise ForewordError(
                f"attention={attention!r}: {unknown[0]!r} is not 'all', 'self', 'cross', 'encoder' or a '+' of them"
            )
        sites = [site for kind in kinds for site in _pick(self.kinds.get(kind, []), layers)]
        if not sites:
            raise ForewordError(f"this model has no {attention} attention; it has {', '.join(self.kinds)}")
        return sites


def _pick(sites: list[Site], layers: int | Iterable[int] | str | None) -> list[Site]:
    if layers is None or not sites:
        return sites
    if layers == "upper":
        return sites[min(2, len(sites) - 1) :]
    if isinstance(layers, str):
        raise ForewordError(f'layers={layers!r}: must be a number, a list of numbers, "upper" or null')
    if isinstance(layers, int):
        if not 1 <= layers <= len(sites):
            raise ForewordError(f"layers={layers}: the model has {len(sites)} {sites[0].kind}-attention layers")
        return sites[-layers:]
    by_layer = {site.layer: site for site in sites}
    count = max(by_layer) + 1
    wanted = [layer + count if layer < 0 else layer for layer in layers]
    missing = [layer for layer in wanted if layer not in by_layer]
    if missing:
        raise ForewordError(f"layers={list(layers)}: no {sites[0].kind} attention in layer {missing[0]}")
    return [by_layer[layer] for layer in sorted(set(wanted))]


# ---------------------------------------------------------------------------------------------------------------------
# Looking


def survey(model: PreTrainedModel) -> Layout:
    """Run `model` on a few tokens and return where and how it attends.

    Raises `ForewordError` where the attention can't be reached.
    """
    install(_implementation(model))
    recorder = Recorder()
    with _watch(model) as seen:
        probe(model, foreword=recorder)
    if not recorder.calls:
        raise ForewordError(_why_unreachable(model))
    sites = [_site(model, module, seen, *states) for module, states in recorder.calls.items()]
    stacks = list(dict.fromkeys(_stack_of(model, site.path) for site in sites))
    skipped = _layers_without(model, sites)
    decoder_only = not model.config.is_encoder_decoder and all(getattr(s.module, "is_causal", True) for s in sites)
    rotates = any(site.rotary is not None for site in sites)
    return Layout(
        sites=sites,
        stacks=stacks,
        skipped=skipped,
        stateful=bool(skipped) or any(getattr(stack, "_is_stateful", False) for stack in stacks),
        decoder_only=decoder_only,
        rotates=rotates,
        learned_positions=decoder_only and not rotates and _embeds_positions(stacks[0], seen),
    )


@torch.no_grad()
def probe(model: PreTrainedModel, ids: Tensor | None = None, **kwargs: Any) -> Any:
    """One forward of the whole model, in evaluation mode, on ids (1, T) or on a few arbitrary tokens.

    An encoder-decoder gets the same ids on both sides; a speech encoder gets silence.
    """
    config, device = model.config, model.device
    inputs: dict[str, Any] = {}
    if ids is None:
        ids = torch.arange(ENCODER_TOKENS, device=device)[None] % config.get_text_config().vocab_size
        decoder_ids = ids[:, :DECODER_TOKENS]
    else:
        ids = decoder_ids = ids.to(device)
    if model.main_input_name == "input_features":
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.zeros(1, config.num_mel_bins, frames, device=device, dtype=model.dtype)
    else:
        inputs["input_ids"] = ids
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = decoder_ids
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return model(**inputs, use_cache=False, **kwargs)
    finally:
        for module in training:
            module.training = True


def _implementation(model: PreTrainedModel) -> str:
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation is None:
        raise ForewordError(f"{type(model).__name__} names no attention; load it with attn_implementation='sdpa'")
    return implementation


@dataclass
class _Seen:
    """What a watched forward showed: the call of each module, and which call produced a tensor."""

    calls: dict[nn.Module, Call] = field(default_factory=dict)
    producers: dict[int, Call] = field(default_factory=dict)  # id of a tensor → the innermost call that returned it
    kept: list[Any] = field(default_factory=list)  # keeps the outputs alive, so that ids stay unique

    def producer(self, value: Any) -> Call | None:
        """The call that returned `value`, or the first of its tensors."""
        tensors = _tensors(value)
        return self.producers.get(id(tensors[0])) if tensors else None


@contextmanager
def _watch(model: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        call = Call(module, by_name(module, args, kwargs))
        seen.calls[module] = call
        seen.kept.append(output)
        for tensor in _tensors(output):
            seen.producers.setdefault(id(tensor), call)

    handles = [module.register_forward_hook(after, with_kwargs=True) for module in model.modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _site(model: PreTrainedModel, module: nn.Module, seen: _Seen, query: Tensor, key: Tensor, value: Tensor) -> Site:
    path = _path_of(model, module)
    layer_path = _LAYER.match(path)
    if layer_path is None:
        raise ForewordError(f"{path} attends outside of any numbered layer; Foreword places adapters by layer")
    call = seen.calls[module]
    hidden = call.arguments["hidden_states"]
    layer = model.get_submodule(layer_path.group())
    layer_input = _first_tensor(seen.calls[layer])
    producer = seen.producer(hidden)
    norm = None
    if producer is not None and hidden is not layer_input and producer.module in set(layer.modules()):
        norm = producer.module
    kind: Kind = "self"
    if model.config.is_encoder_decoder and query.shape[2] != DECODER_TOKENS:
        kind = "encoder"
    elif key.shape[2] != query.shape[2]:
        kind = "cross"
    return Site(
        module=module,
        path=path,
        kind=kind,
        layer=int(layer_path.group(1)),
        layer_module=layer,
        num_heads=query.shape[1],
        num_key_value_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        hidden_size=hidden.shape[-1],
        norm=norm,
        reads_layer_input=(hidden if norm is None else _first_tensor(seen.calls[norm])) is layer_input,
        rotary=seen.producer(call.arguments.get("position_embeddings")),
        call=call,
    )


_LAYER = re.compile(r".*?\.(\d+)(?=\.)")  # up to the first number in a dotted name


def _path_of(model: nn.Module, module: nn.Module) -> str:
    return next(path for path, other in model.named_modules() if other is module)


def _stack_of(model: nn.Module, path: str) -> PreTrainedModel:
    """The innermost transformers model around the module at `path`."""
    parts = path.split(".")
    ancestors = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1))
    return next(module for module in ancestors if isinstance(module, PreTrainedModel))


def _layers_without(model: nn.Module, sites: list[Site]) -> list[str]:
    """Paths of the layers that stand beside the sites' layers and have no site."""
    served = {_LAYER.match(site.path + ".").group() for site in sites}
    lists = dict.fromkeys(path.rsplit(".", 1)[0] for path in served)
    return [
        f"{parent}.{name}"
        for parent in lists
        for name, _ in model.get_submodule(parent).named_children()
        if f"{parent}.{name}" not in served
    ]


def _embeds_positions(stack: PreTrainedModel, seen: _Seen) -> bool:
    """Whether an embedding besides the token embedding ran: learned absolute positions."""
    return any(
        isinstance(module, nn.Embedding) and module is not stack.get_input_embeddings() and module in seen.calls
        for module in stack.modules()
    )


def _why_unreachable(model: PreTrainedModel) -> str:
    attentions = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    named = ", ".join(attentions) or "no attention modules"
    return (
        f"{type(model).__name__} can't take adapters: its layers ({named}) do not call their attention through "
        "transformers' AttentionInterface"
    )


def _call_rotary(rotary: Call, hidden: Tensor, positions: Tensor) -> Any:
    """Repeat a rotary call for hidden states (of which dtype and device count) at positions (1, l)."""
    arguments = {
        name: (hidden if value.is_floating_point() else positions) if isinstance(value, Tensor) else value
        for name, value in rotary.arguments.items()
    }
    return rotary.module(**arguments)


def _is_states(value: Any) -> bool:
    """Hidden states (B, T, d): the module's own, or the encoder's as a cross-attention receives them."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module.forward` by name."""
    names = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _first_tensor(call: Call) -> Tensor | None:
    return next((value for value in call.arguments.values() if isinstance(value, Tensor)), None)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []
