"""The multi-head parallel adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..combines import Activation
from ..model.layout import Layout
from ..sources import HeadBottleneck, Mlp
from ..space import Count, Layers, Method, Point, register, require_choice, require_positive
from .parallel_adapter import UNIFIED_VIEW
from .prefix_tuning import count_key_values


@register
@dataclass(frozen=True)
class MultiheadAdapter(Method):
    """A small network on each head's query, added to the head's output: prefix tuning with ReLU and no softmax.

        o_h ← o_h + ReLU(a_h W_d^h) W_u^h,  a_h = x W_q^h,  W_d^h (D, r), W_u^h (r, D)

    Each head reads its own query, so that a layer has 2·r·d parameters as a parallel adapter has; a network of each
    head on the whole x would have r·d·(H + 1). Free matrices start at W_u = 0, from the unchanged model; those of a
    `reparam` start random, as in the released code, and change it. Stored: 2·r·d an attention. Trainable: as many, or
    the numbers of the generator.

    Use it to compare prefix tuning with adapters: it differs from both in one thing. It trains less steadily than a
    parallel adapter.

    Args:
        bottleneck: r.
        rotated: read the query after its rotary embedding; by default before it, so that the adapter does not see
            positions.
        heads: "query" for a network of each query head; "key-value" for one of each group of heads that share keys,
            which has the parameters of a prefix of length r.
        reparam: None for free matrices; "shared" generates them as a reparameterised prefix, as the released code does.
        hidden: width of that generator.
        layers: None for every layer, n for the top n, or a list of layer numbers.
        attention: "all", or some of "self", "cross", "encoder" joined by "+".
    """

    name: ClassVar[str] = "multihead-adapter"
    learning_rate: ClassVar[float] = 3e-3
    citation: ClassVar[str] = UNIFIED_VIEW
    size: ClassVar[str | None] = "bottleneck"

    bottleneck: int = 30
    rotated: bool = False
    heads: Literal["query", "key-value"] = "query"
    reparam: Literal["shared", "per-layer"] | None = None
    hidden: int = 512
    layers: Layers = None
    attention: str = "all"

    def __post_init__(self) -> None:
        require_positive(self, "bottleneck", "hidden")
        require_choice(self, heads=("query", "key-value"), reparam=(None, "shared", "per-layer"))

    def point(self) -> Point:
        if self.reparam is None:
            source = HeadBottleneck(self.bottleneck, heads=self.heads)
        else:
            per_layer = self.reparam == "per-layer"
            source = Mlp(self.bottleneck, self.hidden, per_layer, init="normal", heads=self.heads)
        return Point(source, Activation(self.rotated), self.layers, self.attention)

    def count(self, layout: Layout) -> Count:
        """2·r·d an attention, with d = H·D or G·D; what a reparameterisation trains is that of `prefix-tuning`."""
        sites = layout.select(self.layers, self.attention)
        return count_key_values(sites, self.bottleneck, self.reparam, self.hidden, self.heads)
