"""Prefix-Tuning+, later called PrefixMemory-Tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..combines import Kernel
from ..model.layout import Layout
from ..sources import Memory
from ..space import Count, Layers, Method, Point, register, require_choice


@register
@dataclass(frozen=True)
class PrefixMemory(Method):
    """A matrix for each head that its query reads: a prefix moved out of the softmax.

        o_h ← o_h + φ(q_h)ᵀ M_h,  M_h (D, D), zero at the start

    A prefix's term is Σ_j φ(q)ᵀφ(k_j) v_jᵀ when the softmax is a kernel; M replaces Σ_j φ(k_j) v_jᵀ by a free matrix,
    without normaliser and without taking mass from the tokens. No code was released: a matrix a head, the query
    before rotation, the place before W_o and the zero start are this library's choice. Trainable and stored: L·H·D².

    Use it where a prefix is too weak, on models with narrow heads.

    Args:
        features: φ, "elu", "elu+1" or "gelu".
        rotated: read the query after its rotary embedding.
        layers: None for every layer, n for the top n, or a list of layer numbers.
        attention: "all", or some of "self", "cross", "encoder" joined by "+".
    """

    name: ClassVar[str] = "prefix-memory"
    learning_rate: ClassVar[float] = 1e-3
    citation: ClassVar[str] = (
        "Wang et al., PrefixMemory-Tuning: Modernizing Prefix-Tuning by Decoupling the Prefix from Attention"
    )

    features: Literal["elu", "elu+1", "gelu"] = "elu"
    rotated: bool = False
    layers: Layers = None
    attention: str = "all"

    def __post_init__(self) -> None:
        require_choice(self, features=("elu", "elu+1", "gelu"))

    def point(self) -> Point:
        return Point(Memory(), Kernel(self.features, self.rotated, mapped_keys=False), self.layers, self.attention)

    def count(self, layout: Layout) -> Count:
        sites = layout.select(self.layers, self.attention)
        total = sum(site.num_heads * site.key_dim * site.value_dim for site in sites)
        return Count(total, total)
