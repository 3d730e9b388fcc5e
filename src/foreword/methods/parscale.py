"""ParScale: parallel streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from ..aggregate import StreamAggregator
from ..combines import Joint
from ..errors import ForewordError
from ..model.layout import Block, Layout, Site
from ..model.part import Part
from ..model.slot import Prefix
from ..model.stream_part import StreamPart
from ..sources.per_stream import PerStream, StreamMlp
from ..sources.text import Start
from ..space import Count, Method, register, require_choice, require_positive
from .own_weights import Full

if TYPE_CHECKING:
    from ..model.adapter import Adapter


@register
@dataclass(frozen=True)
class ParScale(Method):
    """P parallel streams of one input, each behind a prefix of its own, joined before the head by learned weights.

        h_p = model with prefix (P_k^p, P_v^p),  h = Σ_p w̃_p(h_1 … h_P) h_p

    The model reads P copies of every row; `foreword.aggregate.StreamAggregator` has the equation of w̃. Rows go in and
    come out as the user counts them. One adapter can hold a *set* (prefixes and aggregator) for each of several P over
    the same base, and `foreword.set_streams` chooses. P = 1 is the base model without a prefix. Trainable for a set
    of P ≥ 2: P·2·L·l·d_kv + (P·d² + d) + (d·P + P).

    Use it where a small model must do more and its weights, not its arithmetic, are what the machine is short of. A
    forward of P streams costs up to P forwards. Decoding at batch 1 on one CPU thread took 1.09 times the time of P = 1
    with P = 2, and 1.61 times with P = 4 (docs/parscale.md).

    Args:
        streams: P, or several for a set each.
        length: l, prefix tokens of a stream.
        reparam: train the prefixes directly (None), or through a code of each stream and a tanh MLP of each layer
            ("per-layer"), which `fold` collapses. The MLPs are large: 512·2·l·d_kv weights a layer.
        hidden: width of those MLPs.
        smoothing: ε of the weights, at training and inference; 0.01 in the released code, 0.1 in the paper's appendix.
        init: "text" starts each stream from the model's own keys and values for another piece of a text, "normal" from
            N(0, 0.02²).
        base: "frozen", or "full" to train the model's own parameters with the streams (give a learning rate for that).
    """

    name: ClassVar[str] = "parscale"
    learning_rate: ClassVar[float] = 3e-2
    citation: ClassVar[str] = "Chen et al., Parallel Scaling Law for Language Models, NeurIPS 2025"
    size: ClassVar[str | None] = "length"

    streams: int | Sequence[int] = 2
    length: int = 48
    reparam: Literal["per-layer"] | None = None
    hidden: int = 512
    smoothing: float = 0.01
    init: Literal["text", "normal"] = "text"
    base: Literal["frozen", "full"] = "frozen"

    def __post_init__(self) -> None:
        require_positive(self, "length", "hidden")
        require_choice(self, reparam=(None, "per-layer"), init=("text", "normal"), base=("frozen", "full"))
        sizes = self.streams if isinstance(self.streams, Sequence) else [self.streams]
        valid = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
        if not sizes or not valid or len(set(sizes)) < len(sizes):
            raise ForewordError(
                f"ParScale: streams must be a positive integer or several different ones, not {self.streams!r}"
            )
        if not 0 <= self.smoothing < 1:
            raise ForewordError(f"ParScale: smoothing must be at least 0 and below 1, not {self.smoothing}")

    @property
    def sizes(self) -> list[int]:
        """P of each set, ascending."""
        return sorted(self.streams) if isinstance(self.streams, Sequence) else [self.streams]

    def compose(self) -> list[Method]:
        return [self] if self.base == "frozen" else [replace(self, base="frozen"), Full()]

    def parts(self, layout: Layout, start: Start) -> list[Part]:
        if self.base == "full":
            return super().parts(layout, start)
        if not layout.decoder_only:
            raise ForewordError(
                f"parscale joins its streams behind one causal decoder; {type(start.model).__name__} is not one"
            )
        return [self._set(size, layout, start) for size in self.sizes]

    def _set(self, size: int, layout: Layout, start: Start) -> StreamPart:
        if size == 1:
            return StreamPart(self, None, {})
        sites = layout.select(None, "self")
        source = PerStream(size, self.length, self.init, None if self.reparam is None else self.hidden)
        _, sources = source.build(sites, start)
        modules: dict[Site | Block, nn.Module] = {
            site: Prefix(sources[site], Joint().build(site.num_heads)) for site in sites
        }
        aggregator = StreamAggregator(size, width(layout), self.smoothing, start)
        shift = self.length if layout.absolute_positions else 0
        return StreamPart(self, None, modules, shift=shift, streams=size, aggregator=aggregator)

    def count(self, layout: Layout) -> Count:
        """The formula above for every set, plus what the MLPs add in training."""
        if self.base == "full":
            return super().count(layout)
        total = Count(0, 0)
        d = width(layout)
        sites = layout.select(None, "self")
        for size in self.sizes:
            if size > 1:
                prefix = [self.length * site.num_key_value_heads * (site.key_dim + site.value_dim) for site in sites]
                stored = size * sum(prefix) + (size * d * d + d) + (d * size + size)
                trained = stored
                if self.reparam is not None:
                    mlp = size * StreamMlp.CODE * len(sites) + (StreamMlp.CODE + 1) * self.hidden * len(sites)
                    trained += mlp + (self.hidden + 1) * sum(prefix) - size * sum(prefix)
                total += Count(trained, stored)
        return total


def width(layout: Layout) -> int:
    """d of the final hidden states, which is that of the embeddings."""
    return int(layout.stacks[0].get_input_embeddings().weight.shape[1])


@torch.no_grad()
def start_from_prefix(adapter: Adapter, prefix: Adapter, noise: float = 0.1, seed: int = 0) -> None:
    """Start every stream of `adapter` from a trained prefix: the second stage of a two-stage training.

    Stage one trains one prefix (`PrefixTuning(length)`, the P = 1 of a frozen base); stage two trains P streams that
    begin as copies of it, told apart by noise, so its loss begins near where stage one ended.

    Args:
        adapter: of `ParScale`, with the length of `prefix`, on the same model.
        prefix: of `PrefixTuning` on every layer, folded or not.
        noise: standard deviation of the Gaussian noise, relative to that of the numbers it is added to.
        seed: of the noise.

    Raises:
        ForewordError: `prefix` has no keys and values at some layer, or another length.
    """
    generator = torch.Generator().manual_seed(seed)
    part = prefix.parts[0]
    shared = None if part.shared is None else part.shared()
    for streams in (one for one in adapter.parts if isinstance(one, StreamPart)):
        for site in streams.sites:
            trained = part.modules.get(site)
            if not isinstance(trained, Prefix):
                raise ForewordError(
                    f"adapter {prefix.name!r} has no prefix at {site.label}; give a prefix on every layer"
                )
            source = streams.modules[site].source
            key, value = (
                x[None] + noise * x.std() * torch.randn(streams.streams, *x.shape, generator=generator).to(x)
                for x in trained.source(site, shared)
            )  # (P, G, l, D)
            if key.shape != source.every()[0].shape:
                lengths = key.shape[2], source.every()[0].shape[2]
                raise ForewordError(f"adapter {prefix.name!r} has {lengths[0]} prefix tokens, the streams {lengths[1]}")
            source.fit(key, value)
