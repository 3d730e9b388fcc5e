"""A kernel instead of a softmax: a memory matrix that every query reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import elu, gelu

from ..attention.merge import Scoring, full_precision, weigh

FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu, "elu+1": lambda x: elu(x) + 1, "gelu": gelu}


@dataclass(frozen=True)
class Kernel:
    """o_h = softmax(q_h Kᵀ/√D) V + φ(q_h)ᵀ M_h,  M_h = Σ_j φ(k_j) v_jᵀ.

    Linear attention over the prefix without a normaliser, apart from the tokens' softmax (Prefix-Tuning+). With the
    source `Memory`, M is free; with another one it has at most rank l. No parameters of its own.

    Args:
        features: φ, "elu", "elu+1" or "gelu".
        rotated: read the query after its rotary embedding; by default the memory does not see positions.
        mapped_keys: whether φ is applied to the source's keys; `Memory` gives keys that are features already.
    """

    features: Literal["elu", "elu+1", "gelu"] = "elu"
    rotated: bool = False
    mapped_keys: bool = True

    def build(self, num_heads: int) -> nn.Module:
        return LinearAttention(self.features, raw_query=not self.rotated, mapped_keys=self.mapped_keys)


class LinearAttention(nn.Module):
    joins_softmax = False

    def __init__(self, features: str, raw_query: bool, mapped_keys: bool) -> None:
        super().__init__()
        self.features = features
        self.raw_query = raw_query
        self.mapped_keys = mapped_keys

    def forward(
        self, query: Tensor, out: Tensor, lse: Tensor | None, key: Tensor, value: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None]:
        """query, out (B, H, T, D), key, value (B | 1, G | H, l, D) → out plus what the queries read; the same lse."""
        feature_map = FEATURES[self.features]
        if self.mapped_keys:
            key = feature_map(full_precision(key))
        scores = Scoring(scaling=1.0).scores(feature_map(full_precision(query)), key.to(full_precision(query).dtype))
        return out + weigh(scores, value).to(out.dtype), lse
