"""Vector-based random matrix adaptation, by PEFT."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from peft import VeraConfig

from ..model.layout import Layout
from ..model.peft_part import PeftPart
from ..model.projections import linears_of
from ..sources.text import Start
from ..space import Count, Method, register, require_positive


@register
@dataclass(frozen=True)
class Vera(Method):
    """Learned vectors around one frozen random pair of matrices (VeRA). A baseline; PEFT does the work.

        y = x W + b ⊙ ((d ⊙ (x Aᵀ)) Bᵀ),  A, B frozen and shared by all layers, d = 0.1, b = 0 at the start

    A and B come from `projection_seed` and are not stored. Trainable and stored: Σ (r + out).

    Use it as a baseline of LoRA's kind with a tenth of its numbers, where adapters are many and must be small.

    Args:
        r: rank of the frozen pair.
        dropout: on x, in training.
        targets: "query", "key", "value", "output" and "ffn" joined by "+", or "all".
        projection_seed: of A and B.
    """

    name: ClassVar[str] = "vera"
    learning_rate: ClassVar[float] = 3e-1
    citation: ClassVar[str] = "Kopiczko, Blankevoort & Asano, VeRA: Vector-based Random Matrix Adaptation, ICLR 2024"
    size: ClassVar[str | None] = "r"

    r: int = 256
    dropout: float = 0.0
    targets: str = "query+value"
    projection_seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "r")

    def build(self, layout: Layout, start: Start) -> PeftPart:
        blocks = linears_of(layout, self.targets, self.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that A and B are not saved
            config = VeraConfig(
                r=self.r,
                vera_dropout=self.dropout,
                target_modules=[block.path for block in blocks],
                projection_prng_key=self.projection_seed,
                save_projection=False,
            )
        return PeftPart(self, None, {}, targets=blocks, config=config, seed=start.seed)

    def count(self, layout: Layout) -> Count:
        total = sum(self.r + block.output_size for block in linears_of(layout, self.targets, self.name))
        return Count(total, total)
