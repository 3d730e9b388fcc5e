"""Parallel streams of one input, joined by learned weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from ..attention.merge import full_precision
from ..sources.text import Start

WEIGHT_STD = 0.02


class StreamAggregator(nn.Module):
    """h = Σ_p w̃_p h_p,  w̃ = (1 − ε) softmax(W_2 SiLU(W_1 z + c_1) + c_2) + ε/P

    for the P final hidden states h_p of a token, where z holds them interleaved: z[i·P + p] = h_p[i]. W_1 (d, P·d),
    W_2 (P, d). The floor ε/P keeps every stream in the sum (Chen et al. 2025, Parallel Scaling Law for Language
    Models, and the released modeling file, which gives z its order). P·d² + d + d·P + P parameters; weights
    N(0, 0.02²), biases 0 at the start.

    Args:
        streams: P.
        width: d.
        smoothing: ε.
    """

    def __init__(self, streams: int, width: int, smoothing: float, start: Start) -> None:
        super().__init__()
        self.streams = streams
        self.smoothing = smoothing
        self.hidden = _linear(streams * width, width, start)
        self.scores = _linear(width, streams, start)

    def weights(self, hidden: Tensor) -> Tensor:
        """w̃ of each token, in fp32 or better: (P, B, T, d) → (B, T, P)."""
        interleaved = hidden.movedim(0, -1).flatten(-2)  # z, (B, T, d·P)
        scores = self.scores(nn.functional.silu(self.hidden(interleaved.to(self.hidden.weight.dtype))))
        weights = full_precision(scores).softmax(-1)
        return (1 - self.smoothing) * weights + self.smoothing / self.streams

    def forward(self, hidden: Tensor) -> Tensor:
        """(P, B, T, d) → (B, T, d)."""
        weights = self.weights(hidden)
        return torch.einsum("btp,pbtd->btd", weights, hidden.to(weights.dtype)).to(hidden.dtype)


def _linear(inputs: int, outputs: int, start: Start) -> nn.Linear:
    linear = skip_init(nn.Linear, inputs, outputs, dtype=start.dtype)
    nn.init.normal_(linear.weight, std=WEIGHT_STD, generator=start.generator)
    nn.init.zeros_(linear.bias)
    return linear
