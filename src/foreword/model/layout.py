"""The places of a model where an adapter can act, as `foreword.model.survey` found them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.readers import KeyValue, Projection
from ..errors import ForewordError

Kind = Literal["self", "cross", "encoder"]
Layers = int | Iterable[int] | str | None
Placed = TypeVar("Placed", "Site", "Block")


@dataclass
class Call:
    """One call of a module as it was seen: its arguments by name."""

    module: nn.Module
    arguments: dict[str, Any]


@dataclass(eq=False)
class Block:
    """A module that maps x to h, or a run of modules: a sublayer, a linear layer or a norm.

    Attributes:
        kind: "ffn" or "encoder-ffn", "residual" or "encoder-residual" for one seen `on_residual`; "self-output",
            "cross-output" or "encoder-output" for what an attention gives after its output projection; "linear" and
            "norm", with "encoder-" in front in the encoder of an encoder-decoder; "head".
        layer: number of its layer; None outside of layers.
        name: within its layer or model, where a layer has several of the kind.
        path: dotted name of `module`.
        enter: the module whose first input is x; often `module` itself.
        module: the module whose output is h.
        input_size, output_size: widths of x and h.
        like: an empty tensor with the device and dtype of h.
        linears: the linear layers inside, in the order in which they run.
        dense: whether those linear layers hold all of its matrices; experts of a mixture don't.
        post_norm: the norm that the layer applies to the residual sum behind this sublayer, in post-norm models.
        pre_norm: the norm whose output is x, in pre-norm models.
    """

    kind: str
    layer: int | None
    name: str
    path: str
    enter: nn.Module
    module: nn.Module
    input_size: int
    output_size: int
    like: Tensor
    linears: list[Block] = field(default_factory=list)
    dense: bool = True
    post_norm: Block | None = None
    pre_norm: nn.Module | None = None

    @property
    def on_residual(self) -> Block:
        """This sublayer seen from the residual stream: x is what its norm reads. Itself where no norm stands before."""
        if self.pre_norm is None:
            return self
        return replace(self, kind=self.kind.replace("ffn", "residual"), enter=self.pre_norm)

    @property
    def label(self) -> str:
        """Name in adapter files: independent of the class that wraps the model."""
        parts = [self.kind, "final" if self.layer is None else str(self.layer), self.name.replace(".", "-")]
        return ".".join(part for part in parts if part)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device


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
        linears: the linear layers that run before the attention function: its projections of queries, keys and values.
        output: the attention's output after its output projection.
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
    linears: list[Block]
    output: Block

    @property
    def label(self) -> str:
        """Name of the site in adapter files: independent of the class that wraps the model."""
        return f"{self.kind}.{self.layer}"

    def project(self, hidden: Tensor, positions: Tensor, *, norm: bool) -> KeyValue:
        """The keys and values that this attention makes of hidden states, in cache space.

        The module itself is called, with its attention skipped, so that fused, quantized, offloaded and adapted
        projections, QK-norm and every kind of rotary embedding are the model's own.

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
        projection = self.run(
            {name: hidden for name, value in self.call.arguments.items() if is_states(value)}, positions
        )
        return projection.key[0], projection.value[0]

    def raw_query(self, arguments: dict[str, Any]) -> Tensor:
        """x W_q^h (B, H, T, D) of a call with `arguments`: the query before its rotation, after QK-norm.

        The module is called a second time at position 0, where the rotation is the identity, with its attention
        skipped.
        """
        states = {name: value for name, value in arguments.items() if is_states(value)}
        length = states["hidden_states"].shape[1]
        projection = self.run(states, torch.zeros(length, dtype=torch.long, device=states["hidden_states"].device))
        return projection.query

    def run(self, states: dict[str, Tensor], positions: Tensor) -> Projection:
        """Call the module for hidden states (B, T, d) at positions (T,), with its attention skipped."""
        arguments: dict[str, Any] = dict.fromkeys(self.call.arguments) | states
        if self.rotary is not None:
            arguments["position_embeddings"] = call_rotary(self.rotary, states["hidden_states"], positions[None])
        if "position_ids" in self.call.arguments:
            arguments["position_ids"] = positions[None]
        projection = Projection()
        self.module(**(arguments | {"foreword": projection}))
        return projection

    @property
    def dtype(self) -> torch.dtype:
        return self.call.arguments["hidden_states"].dtype

    @property
    def device(self) -> torch.device:
        return self.call.arguments["hidden_states"].device


@dataclass(eq=False)
class Layout:
    """What attaching needs to know of a model.

    Attributes:
        model: the model.
        sites: every attention module that dispatches, in the order in which the model runs them.
        ffns: the feed-forward sublayer of every layer.
        norms: every norm that has parameters.
        layers: paths of the layers.
        stacks: the models inside the model (decoder, encoder) that take token positions and masks.
        encoders: those of the stacks that encode the source of an encoder-decoder.
        skipped: paths of layers that have no such attention (state-space, convolution, …).
        stateful: some layers carry a recurrent or convolutional state beside attention.
        decoder_only: one causal stack.
        rotates: keys are rotated by their position, which may be any integer.
        absolute_positions: a decoder looks its positions up in a table that begins at 0, to embed them with the tokens
            or to rotate keys.
        position_embedding: the module that embeds them in an encoder, which counts them by itself; None elsewhere.
        head: the linear layer that makes logits; None where the model has none.
    """

    model: PreTrainedModel
    sites: list[Site]
    ffns: list[Block]
    norms: list[Block]
    layers: list[str]
    stacks: list[PreTrainedModel]
    encoders: list[PreTrainedModel]
    skipped: list[str]
    stateful: bool
    decoder_only: bool
    rotates: bool
    absolute_positions: bool
    position_embedding: nn.Module | None
    head: Block | None
    kinds: dict[str, list[Site]] = field(init=False)
    traced: dict[Any, dict[str, str]] = field(default_factory=dict)  # see `foreword.model.projections`

    def __post_init__(self) -> None:
        self.kinds = {}
        for site in self.sites:
            self.kinds.setdefault(site.kind, []).append(site)

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move what the survey kept as templates, as `nn.Module.to` moves parameters."""
        heads = [] if self.head is None else [self.head]
        for site in self.sites:
            arguments = site.call.arguments
            arguments.update({name: fn(value) for name, value in arguments.items() if is_states(value)})
        for block in {*self.ffns, *self.norms, *self.linears, *(site.output for site in self.sites), *heads}:
            block.like = fn(block.like)

    def select(self, layers: Layers, attention: str) -> list[Site]:
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

    def select_ffns(self, layers: Layers) -> list[Block]:
        """The feed-forward sublayers of the chosen layers of each stack; `layers` as in `select`."""
        kinds = dict.fromkeys(block.kind for block in self.ffns)
        return [
            block for kind in kinds for block in _pick([other for other in self.ffns if other.kind == kind], layers)
        ]

    @property
    def linears(self) -> list[Block]:
        """Every linear layer of the attention and feed-forward sublayers."""
        attention = [block for site in self.sites for block in (*site.linears, *site.output.linears)]
        return attention + [block for ffn in self.ffns for block in ffn.linears]


def _pick(sites: list[Placed], layers: Layers) -> list[Placed]:
    if layers is None or not sites:
        return sites
    if layers == "upper":
        return sites[min(2, len(sites) - 1) :]
    if isinstance(layers, int):
        if not 1 <= layers <= len(sites):
            raise ForewordError(f"layers={layers}: the model has {len(sites)} {_layers_of(sites[0])}")
        return sites[-layers:]
    if isinstance(layers, str) or not isinstance(layers, Iterable) or not layers:
        raise ForewordError(f'layers={layers!r}: must be a number, a list of numbers, "upper" or null')
    by_layer = {site.layer: site for site in sites}
    count = max(by_layer) + 1
    wanted = {}
    for layer in layers:
        at = layer + count if isinstance(layer, int) and layer < 0 else layer
        if at not in by_layer:
            raise ForewordError(f"layers={list(layers)}: layer {layer!r} is none of the {_layers_of(sites[0])}")
        wanted[at] = by_layer[at]
    return [wanted[layer] for layer in sorted(wanted)]


def _layers_of(place: Site | Block) -> str:
    return f"{place.kind} layers" if isinstance(place, Block) else f"{place.kind}-attention layers"


def call_rotary(rotary: Call, hidden: Tensor, positions: Tensor) -> Any:
    """Repeat a rotary call for hidden states (of which dtype and device count) at positions (1, l)."""
    arguments = {
        name: (hidden if value.is_floating_point() else positions) if isinstance(value, Tensor) else value
        for name, value in rotary.arguments.items()
    }
    return rotary.module(**arguments)


def is_table(rotary: Call) -> bool:
    """Whether a rotary embedding is looked up by index, so that −1 is its last entry and no turn back.

    cos(−θ) = cos(θ) and sin(−θ) = −sin(θ), in whatever order and form a model keeps them. A model on the meta device,
    which has no values, is taken for one that rotates.
    """
    hidden = next(value for value in tensors_in(rotary.arguments) if value.is_floating_point())
    if hidden.is_meta:
        return False
    back, on = (
        [torch.view_as_real(turn) if turn.is_complex() else turn for turn in tensors_in(turns)]
        for turns in (call_rotary(rotary, hidden, torch.full((1, 1), at, device=hidden.device)) for at in (-1, 1))
    )
    return not all(torch.allclose(a.abs(), b.abs(), atol=1e-3) for a, b in zip(back, on, strict=True))


def is_states(value: Any) -> bool:
    """Hidden states (B, T, d): the module's own, or the encoder's as a cross-attention receives them."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module.forward` by name."""
    return {**dict(zip(_parameters(type(module)), args, strict=False)), **kwargs}


@functools.cache
def _parameters(module_class: type[nn.Module]) -> list[str]:
    return list(inspect.signature(inspect.unwrap(module_class.forward)).parameters)[1:]


def first_tensor(call: Call) -> Tensor | None:
    return next((value for value in call.arguments.values() if isinstance(value, Tensor)), None)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of a module's output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (tuple, list)) else []
