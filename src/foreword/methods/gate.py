"""The gate of UniPELT: one number an example, computed once from its prompt."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention.readers import Plan
from ..sources.text import Start

GATE_STD = 0.02


class PromptGate(nn.Module):
    """γ = mean over the prompt's tokens t of σ(x_t w + b), w (d,), b a number.

    Padding and, in training, the tokens to learn are left out of the mean, so that an output never depends on a later
    token. During a generation with a cache γ stays what the first step made it.

    Args:
        size: d.
        start: where w ~ N(0, 0.02²) comes from; b = 0.
    """

    reads_prompt = True

    def __init__(self, size: int, start: Start) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.normal(size, std=GATE_STD))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, plan: Plan, rows: Tensor | None) -> Tensor:
        """x (B, …, T, d) of some rows of a batch → γ (B, 1, …, 1) of those rows, in the dtype of x."""
        gate = plan.remember((self, rows), lambda: self._mean(x.flatten(1, -2), plan.prompt, rows))
        return gate.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)

    def _mean(self, x: Tensor, prompt: Tensor | None, rows: Tensor | None) -> Tensor:
        opening = torch.sigmoid(x.to(self.weight.dtype) @ self.weight + self.bias)  # (B, T)
        if prompt is None:
            return opening.mean(1)
        prompt = prompt if rows is None else prompt[rows]
        opening = opening[:, : prompt.shape[1]]  # a layer that reads its static cache is given empty places behind it
        return (opening * prompt).sum(1) / prompt.sum(1).clamp(min=1)
