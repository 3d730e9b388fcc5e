"""An activation instead of a softmax: the multi-head parallel adapter."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.merge import Scoring, weigh


@dataclass(frozen=True)
class Activation:
    """o_h = softmax(q_h Kᵀ/√D) V + ReLU(a_h P_kᵀ) P_v,  a_h = x W_q^h.

    The ungated prefix with ReLU in the softmax's place, or one two-layer network a head that reads the head's query:
    W_d^h = P_kᵀ, W_u^h = P_v (He et al. 2022, §3.3 and Table 4). No parameters of its own.

    Args:
        rotated: read the query after its rotary embedding, as the softmax does; by default the adapter does not see
            positions. The same in models without rotary embeddings.
    """

    rotated: bool = False

    def build(self, num_heads: int) -> nn.Module:
        return HeadNetwork(raw_query=not self.rotated)


class HeadNetwork(nn.Module):
    joins_softmax = False

    def __init__(self, raw_query: bool) -> None:
        super().__init__()
        self.raw_query = raw_query

    def forward(
        self, query: Tensor, out: Tensor, lse: Tensor | None, key: Tensor, value: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None]:
        """query, out (B, H, T, D), key, value (B | 1, G | H, r, D) → out plus the networks' output; the same lse."""
        hidden = torch.relu(Scoring(scaling=1.0).scores(query, key))  # (B, H, T, r)
        hidden = nn.functional.dropout(hidden, scoring.dropout, training=scoring.dropout > 0)
        return out + weigh(hidden, value).to(out.dtype), lse
