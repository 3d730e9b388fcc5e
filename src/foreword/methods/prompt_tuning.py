"""Prompt tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..combines import Joint
from ..model.layout import Layout
from ..sources import SoftPrompt
from ..space import Count, Method, Point, register, require_choice, require_positive


@register
@dataclass(frozen=True)
class PromptTuning(Method):
    """Learned rows in front of the token embeddings.

        X⁰ = [P; Emb(ids)],  P ∈ R^{l×d}

    Computed as the KV prefix that the frozen model makes of P, once for the whole batch: the same outputs, and no
    rows of P in masks, labels or the KV cache. Trainable and stored: l·d, once.

    Use it where a few kilobytes must do, on causal language models. It learns slowly on small models.

    Args:
        length: l, prompt tokens.
        init: "text" starts from the embeddings of real tokens, "normal" from N(0, 0.02²).
    """

    name: ClassVar[str] = "prompt-tuning"
    learning_rate: ClassVar[float] = 3e-2
    citation: ClassVar[str] = (
        "Lester, Al-Rfou & Constant, The Power of Scale for Parameter-Efficient Prompt Tuning, EMNLP 2021"
    )
    size: ClassVar[str | None] = "length"

    length: int = 30
    init: Literal["text", "normal"] = "text"

    def __post_init__(self) -> None:
        require_positive(self, "length")
        require_choice(self, init=("text", "normal"))

    def point(self) -> Point:
        return Point(SoftPrompt(self.length, self.init), Joint(), attention="self")

    def count(self, layout: Layout) -> Count:
        total = self.length * layout.sites[0].hidden_size
        return Count(total, total)
