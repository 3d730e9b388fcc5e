"""The MAM adapter: mix and match."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..space import Layers, Method, in_proportion, register
from .parallel_adapter import UNIFIED_VIEW, ParallelAdapter
from .prefix_tuning import PrefixTuning


@register
@dataclass(frozen=True)
class Mam(Method):
    """A short prefix at every attention and a scaled parallel adapter at every FFN (mix-and-match adapter).

        prefix-tuning(length = l) + parallel-adapter(site = "ffn", bottleneck = r, scale = s)

    A composition and nothing more. Trainable (free prefix) and stored: 2·l·d_kv an attention + 2·r·d an FFN.

    Use it where a few per cent of the model's parameters may be spent and the best quality is wanted.

    Args:
        length: l, prefix tokens; 16 for GLUE.
        bottleneck: r; 16 for GLUE.
        scale: s; 2 for GLUE.
        reparam: of the prefix: None, "shared" (the paper's) or "per-layer".
        hidden: width of that reparameterisation.
        layers: None for every layer, n for the top n, or a list of layer numbers.
    """

    name: ClassVar[str] = "mam"
    learning_rate: ClassVar[float] = 3e-3
    citation: ClassVar[str] = UNIFIED_VIEW
    size: ClassVar[str | None] = "bottleneck"

    length: int = 30
    bottleneck: int = 512
    scale: float = 4.0
    reparam: Literal["shared", "per-layer"] | None = None
    hidden: int = 800
    layers: Layers = None

    def __post_init__(self) -> None:
        self.compose()

    def at_size(self, size: int) -> Mam:
        return replace(self, bottleneck=size, length=in_proportion(self.length, size, self.bottleneck))

    def compose(self) -> list[Method]:
        return [
            PrefixTuning(length=self.length, reparam=self.reparam, hidden=self.hidden, layers=self.layers),
            ParallelAdapter(bottleneck=self.bottleneck, site="ffn", scale=self.scale, layers=self.layers),
        ]
