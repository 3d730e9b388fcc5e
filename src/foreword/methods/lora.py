"""Low-rank adaptation, by PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from peft import LoraConfig

from ..model.layout import Layout
from ..model.peft_part import PeftPart
from ..model.projections import linears_of
from ..sources.text import Start
from ..space import Count, Method, register, require_positive


@register
@dataclass(frozen=True)
class Lora(Method):
    """A low-rank matrix beside frozen weights (LoRA). The baseline; PEFT does the work.

        y = x W + (α/r) · Drop(x) Aᵀ Bᵀ,  A (r, in), B (out, r), B = 0 at the start

    Trainable and stored: Σ r·(in + out) over the adapted layers; r·[(d + d_q) + (d + d_kv)] a layer for queries and
    values.

    Use it as the baseline that everyone knows, and where the adapter should be merged into the weights.

    Args:
        r: rank.
        alpha: α; the scale is α/r.
        dropout: on x, in training.
        targets: "query", "key", "value", "output" and "ffn" joined by "+", or "all".
    """

    name: ClassVar[str] = "lora"
    learning_rate: ClassVar[float] = 1e-2
    citation: ClassVar[str] = "Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022"
    size: ClassVar[str | None] = "r"

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str = "query+value"

    def __post_init__(self) -> None:
        require_positive(self, "r")

    def build(self, layout: Layout, start: Start) -> PeftPart:
        blocks = linears_of(layout, self.targets, self.name)
        config = LoraConfig(
            r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=[block.path for block in blocks]
        )
        return PeftPart(self, None, {}, targets=blocks, config=config, seed=start.seed, mixes=True)

    def count(self, layout: Layout) -> Count:
        total = sum(self.r * (b.input_size + b.output_size) for b in linears_of(layout, self.targets, self.name))
        return Count(total, total)
