"""A softmax of the prefix's own, behind a gate that starts closed."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.merge import Scoring, attend, full_precision


@dataclass(frozen=True)
class ZeroGate:
    """o_h = softmax(q_h Kᵀ/√D) V + tanh(g_h) · softmax(q_h P_kᵀ/√D) P_v.

    One gate g_h a layer and query head. With g = 0 the output is the frozen model's, bit for bit (LLaMA-Adapter, Zhang
    et al. 2023, §3.2; the released training code has the tanh and the heads).

    Args:
        opening: the initial tanh(g), 0 ≤ opening < 1; 0 is the method, others are controls.
    """

    opening: float = 0.0

    def build(self, num_heads: int) -> nn.Module:
        return GatedSoftmax(num_heads, self.opening)


class GatedSoftmax(nn.Module):
    joins_softmax = False

    def __init__(self, num_heads: int, opening: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((num_heads,), opening).atanh())  # g, (H,)

    def as_softmax(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (G, l, D) → (H, l, D), whose softmax is the term: tanh(g) (w V) = w (tanh(g) V)."""
        repeats = len(self.gate) // len(key)
        gate = torch.tanh(self.gate)[:, None, None]  # (H, 1, 1)
        return key.repeat_interleave(repeats, 0), gate * value.repeat_interleave(repeats, 0)

    def forward(
        self, query: Tensor, out: Tensor, lse: Tensor | None, key: Tensor, value: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None]:
        """query, out (B, H, T, D), key and value (B | 1, G, l, D) → out plus the gated prefix; lse unchanged."""
        prefix_out, _, _ = attend(query, key, value, scoring)
        gate = torch.tanh(self.gate)[:, None, None]  # (H, 1, 1)
        return out + (gate * full_precision(prefix_out)).to(out.dtype), lse
