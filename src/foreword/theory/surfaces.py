"""Surfaces of parameters theta(phi) that a constrained search stays on; see `fit.Embedding`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .model import DTYPE, Model


class HeldGate:
    """The gate of problem f is held at alpha[f]: theta = [alpha_f, phi]. Its model has a separate softmax.

    `alpha` (F,), one for every problem of the search.
    """

    def __init__(self, model: Model, alpha: Tensor) -> None:
        self.alpha = alpha
        self.slope = torch.eye(model.parameters, dtype=DTYPE)[:, 1:]  # (P, P - 1)

    def __call__(self, phi: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        theta = torch.cat([self.alpha[which].unsqueeze(-1), phi], -1)
        return theta, self.slope.expand(len(phi), -1, -1)


class SplitPrompt:
    """One prompt is split in two halves of equal weight that stand a distance delta apart.

    With phi = [theta of one prompt fewer, direction w], whose first prompt (b, p) is the one that is split,

        halves (b - log 2, p + delta/2 w/|w|) and (b - log 2, p - delta/2 w/|w|), then the other prompts as they are

    The prompts of `model` come from one fewer in phi. `delta` (F,) is the distance in problem f, and
    `coordinates` are those of an atom that w spans (all of p, or the key's or the value's part of (k, v)).
    """

    def __init__(self, model: Model, delta: Tensor, coordinates: Sequence[int]) -> None:
        self.delta = delta
        first = model.gated
        inner = model.parameters - model.width  # parameters of the model with one prompt fewer
        copy = torch.zeros(model.parameters, inner, dtype=DTYPE)  # d theta / d phi without the direction
        copy[:first, :first] = torch.eye(first)
        copy[first + model.width :, first:] = torch.eye(inner - first)
        copy[first : first + model.width, first : first + model.width] = torch.eye(model.width)
        self.copy = copy
        self.inner = inner
        self.halve = torch.zeros(model.parameters, dtype=DTYPE)
        self.halve[[first, first + model.width]] = -torch.tensor(2.0, dtype=DTYPE).log()
        self.spread = torch.zeros(model.parameters, len(coordinates), dtype=DTYPE)  # d theta / d (delta/2 w/|w|)
        for column, coordinate in enumerate(coordinates):
            self.spread[first + 1 + coordinate, column] = 1
            self.spread[first + model.width + 1 + coordinate, column] = -1

    def __call__(self, phi: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        inner, w = phi.tensor_split([self.inner], -1)
        length = w.norm(dim=-1, keepdim=True)
        u, half = w / length, self.delta[which].unsqueeze(-1) / 2
        theta = inner @ self.copy.T + self.halve + (half * u) @ self.spread.T
        tangent = torch.eye(w.shape[-1], dtype=DTYPE) - u.unsqueeze(-1) * u.unsqueeze(-2)  # |w| du/dw
        turn = self.spread @ ((half / length).unsqueeze(-1) * tangent)
        return theta, torch.cat([self.copy.expand(len(phi), -1, -1), turn], -1)
