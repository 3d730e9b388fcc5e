"""Deep prompts: hidden-state prefixes, put in again at every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..combines import Joint
from ..model.layout import Layout
from ..sources import Hidden
from ..space import Count, Layers, Method, Point, register, require_choice, require_positive


@register
@dataclass(frozen=True)
class DeepPrompt(Method):
    """Learned hidden-state rows in front of every layer's input.

        H^{i+1} = [p^{i+1}; H̄^{i+1}],  K = R_{j−l}(W_k LN(p_j)),  V = W_v LN(p_j)

    Each layer drops what the previous one made of its prefix rows and reads fresh ones, through its own norm, frozen
    projections and rotary embedding. Trainable and stored: L·l·d. (The released code of P-tuning v2 trains free keys
    and values instead: that is `prefix-tuning`.)

    Use it where keys and values must stay what the frozen projections make of some hidden state; free ones of the same
    number (`prefix-tuning`) need fewer steps.

    Args:
        length: l, rows.
        layers: None for every layer, n for the top n, or a list of layer numbers.
        init: "text" starts from the hidden states of real tokens, "normal" from N(0, 0.02²).
    """

    name: ClassVar[str] = "deep-prompt"
    learning_rate: ClassVar[float] = 1e-1
    citation: ClassVar[str] = (
        "Liu et al., P-Tuning v2: Prompt Tuning Can Be Comparable to Fine-tuning Universally Across Scales and Tasks, "
        "ACL 2022; Petrov et al., When Do Prompting and Prefix-Tuning Work?, ICLR 2024"
    )
    size: ClassVar[str | None] = "length"

    length: int = 30
    layers: Layers = None
    init: Literal["text", "normal"] = "text"

    def __post_init__(self) -> None:
        require_positive(self, "length")
        require_choice(self, init=("text", "normal"))

    def point(self) -> Point:
        return Point(Hidden(self.length, self.init), Joint(), self.layers, attention="self+encoder")

    def count(self, layout: Layout) -> Count:
        total = sum(self.length * site.hidden_size for site in layout.select(self.layers, "self+encoder"))
        return Count(total, total)
