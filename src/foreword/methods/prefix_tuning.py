"""Prefix tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..combines import Joint
from ..errors import ForewordError
from ..model.layout import Layout, Site
from ..sources import Direct, Mlp
from ..space import Count, Layers, Method, Point, register, require_choice, require_positive


@register
@dataclass(frozen=True)
class PrefixTuning(Method):
    """Learned keys and values in front of the tokens of every attention.

        head_h = softmax(q_h [P_k; K]ᵀ/√D) [P_v; V]

    P_k and P_v are free parameters in cache space, or come through E → tanh(E W_1 + b_1) W_2 + b_2 in training
    (`reparam`), which `fold` collapses. Trainable: 2·L·l·d_kv when free; stored: always that.

    Use it as the first choice on any model: strong, small, free of cost in the KV cache.

    Args:
        length: l, prefix tokens.
        reparam: None for free parameters, "shared" for one MLP for all layers (a copy for each kind of attention), or
            "per-layer".
        hidden: width m of the MLP; 512 in Li & Liang, 800 for summarisation and in He et al.
        dropout: on the prefix's keys and values, in training.
        layers: None for every layer, n for the top n, or a list of layer numbers.
        attention: "all", or some of "self", "cross", "encoder" joined by "+".
        init: "text" starts from the model's own keys and values for real tokens; "normal" from N(0, 0.02²) (free) or
            PyTorch's defaults (MLP), as in the papers' code; "zero" (free only), which is not a no-op.
        frozen_tokens: first tokens that stay as initialised; 1 keeps an attention sink. Free parameters only.
    """

    name: ClassVar[str] = "prefix-tuning"
    learning_rate: ClassVar[float] = 3e-2
    citation: ClassVar[str] = (
        "Li & Liang, Prefix-Tuning: Optimizing Continuous Prompts for Generation, ACL 2021; "
        "He et al., Towards a Unified View of Parameter-Efficient Transfer Learning, ICLR 2022"
    )
    size: ClassVar[str | None] = "length"

    length: int = 30
    reparam: Literal["shared", "per-layer"] | None = None
    hidden: int = 512
    dropout: float = 0.0
    layers: Layers = None
    attention: str = "all"
    init: Literal["text", "normal", "zero"] = "text"
    frozen_tokens: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "length", "hidden")
        require_choice(self, reparam=(None, "shared", "per-layer"), init=("text", "normal", "zero"))
        if not 0 <= self.dropout < 1:
            raise ForewordError(f"PrefixTuning: dropout must be at least 0 and below 1, not {self.dropout}")
        if not 0 <= self.frozen_tokens < self.length:
            raise ForewordError(f"PrefixTuning: frozen_tokens must be from 0 to length − 1, not {self.frozen_tokens}")
        if self.reparam is not None and (self.frozen_tokens or self.init == "zero"):
            raise ForewordError('PrefixTuning: frozen_tokens and init="zero" need free parameters, reparam=None')

    @property
    def least_size(self) -> int:
        return 1 + self.frozen_tokens

    def point(self) -> Point:
        if self.reparam is None:
            source = Direct(self.length, self.init, self.frozen_tokens)
        else:
            source = Mlp(self.length, self.hidden, per_layer=self.reparam == "per-layer", init=self.init)
        return Point(source, Joint(), self.layers, self.attention, self.dropout)

    def count(self, layout: Layout) -> Count:
        sites = layout.select(self.layers, self.attention)
        count = count_key_values(sites, self.length, self.reparam, self.hidden)
        frozen = count_key_values(sites, self.frozen_tokens, None, self.hidden).trainable
        return Count(count.trainable - frozen, count.stored)


def count_key_values(
    sites: list[Site], length: int, reparam: str | None, hidden: int, heads: str = "key-value"
) -> Count:
    """l·(D_k + D_v) a head, free or through an MLP.

    Stored: Σ l·G·(D_k + D_v), 2·L·l·d_kv. Trained through an MLP, for each of its copies: l·d + (d·m + m) + (m + 1)·Σ
    G·(D_k + D_v).
    """
    widths = {
        site: (site.num_heads if heads == "query" else site.num_key_value_heads) * (site.key_dim + site.value_dim)
        for site in sites
    }
    stored = length * sum(widths.values())
    if reparam is None:
        return Count(stored, stored)
    copies = [[s] for s in sites]
    if reparam == "shared":
        copies = [[s for s in sites if s.kind == kind] for kind in dict.fromkeys(s.kind for s in sites)]
    trainable = 0
    for members in copies:
        d, out = members[0].hidden_size, sum(widths[site] for site in members)
        trainable += length * d + (d * hidden + hidden) + (hidden + 1) * out
    return Count(trainable, stored)
