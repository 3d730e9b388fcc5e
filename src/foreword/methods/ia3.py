"""(IA)³, by PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from peft import IA3Config

from ..model.layout import Block, Layout
from ..model.peft_part import PeftPart
from ..model.projections import linears_of
from ..sources.text import Start
from ..space import Count, Method, register


@register
@dataclass(frozen=True)
class IA3(Method):
    """Learned factors on keys, values and the inner activation of the FFN ((IA)³). A baseline; PEFT does the work.

        k ← l_k ⊙ k (before its rotation),  v ← l_v ⊙ v,  FFN: (l_f ⊙ γ(x W_1)) W_2,  all ones at the start

    Where a model computes queries, keys and values in one projection, its whole output is scaled. Trainable and stored:
    L·(2·d_kv + f); it folds into the weights. Use it where a few hundred thousand numbers must do on a large model.
    """

    name: ClassVar[str] = "ia3"
    learning_rate: ClassVar[float] = 1e-1
    citation: ClassVar[str] = (
        "Liu et al., Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning, "
        "NeurIPS 2022"
    )

    def build(self, layout: Layout, start: Start) -> PeftPart:
        outputs, inners = self._targets(layout)
        config = IA3Config(
            target_modules=[block.path for block in (*outputs, *inners)], feedforward_modules=[b.path for b in inners]
        )
        return PeftPart(self, None, {}, targets=outputs + inners, config=config, seed=start.seed)

    def count(self, layout: Layout) -> Count:
        outputs, inners = self._targets(layout)
        total = sum(block.output_size for block in outputs) + sum(block.input_size for block in inners)
        return Count(total, total)

    def _targets(self, layout: Layout) -> tuple[list[Block], list[Block]]:
        """The projections whose output is scaled, and the FFN matrices whose input is."""
        linears_of(layout, "ffn", self.name)  # refuses experts
        return linears_of(layout, "key+value", self.name), [ffn.linears[-1] for ffn in layout.ffns]
