"""Prefix tuning without the gate that the joint softmax is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..combines import Ungated
from ..space import Point, register
from .parallel_adapter import UNIFIED_VIEW
from .prefix_tuning import PrefixTuning


@register
@dataclass(frozen=True)
class UngatedPrefix(PrefixTuning):
    """A prefix with a softmax of its own, added to the tokens' attention as it is.

        head_h = softmax(q_h Kᵀ/√D) V + softmax(q_h P_kᵀ/√D) P_v

    The ablation "−gating" of He et al.: prefix tuning is (1 − λ)·tokens + λ·prefix, and this is the sum without λ.
    Parameters and fields are those of `prefix-tuning`, but for `init`, "normal" here: what the second softmax adds is
    small at step 0, where "text" would add the values of real tokens, which no λ holds down.

    Use it as a control.
    """

    name: ClassVar[str] = "ungated-prefix"
    learning_rate: ClassVar[float] = 3e-2
    citation: ClassVar[str] = UNIFIED_VIEW

    init: Literal["text", "normal", "zero"] = "normal"

    def point(self) -> Point:
        return replace(super().point(), combine=Ungated())
