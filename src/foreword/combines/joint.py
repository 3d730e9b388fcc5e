"""One softmax over the prefix and the tokens."""

from dataclasses import dataclass

from torch import Tensor, nn

from ..attention.merge import Scoring, attend, merge


@dataclass(frozen=True)
class Joint:
    """o = softmax(q [P_k; K]ᵀ/√D) [P_v; V] = (1 − λ) o_x + λ o_p,  λ = σ(lse_p − lse_x).

    The prefix takes part in the tokens' softmax, as if its keys and values stood in the KV cache (Li & Liang 2021;
    the form with λ: He et al. 2022, eq. 7). No parameters.
    """

    def build(self, num_heads: int) -> nn.Module:
        return JointSoftmax()


class JointSoftmax(nn.Module):
    joins_softmax = True

    def as_softmax(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (G, l, D) and values (G, l, D) to read in the tokens' softmax."""
        return key, value

    def forward(
        self, query: Tensor, out: Tensor, lse: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """query, out (B, H, T, D), lse (B, H, T), key and value (B | 1, G, l, D) → the joint output and its lse."""
        prefix_out, prefix_lse, _ = attend(query, key, value, scoring)
        return merge(out, lse, prefix_out, prefix_lse)
