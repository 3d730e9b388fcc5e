"""A softmax of the prefix's own, added as it is."""

from dataclasses import dataclass

from torch import Tensor, nn

from ..attention.merge import Scoring, attend


@dataclass(frozen=True)
class Ungated:
    """o = softmax(q Kᵀ/√D) V + softmax(q P_kᵀ/√D) P_v.

    The joint softmax without λ (He et al. 2022, Table 4, "−gating").
    """

    def build(self, num_heads: int) -> nn.Module:
        return AddedSoftmax()


class AddedSoftmax(nn.Module):
    joins_softmax = False

    def as_softmax(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (G, l, D) and values (G, l, D) whose softmax is the term."""
        return key, value

    def forward(
        self, query: Tensor, out: Tensor, lse: Tensor | None, key: Tensor, value: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None]:
        """query, out (B, H, T, D), key and value (B | 1, G, l, D) → out plus the prefix's attention; lse unchanged."""
        prefix_out, _, _ = attend(query, key, value, scoring)
        return out + prefix_out.to(out.dtype), lse
