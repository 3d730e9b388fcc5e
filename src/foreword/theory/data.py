"""Data sets of a problem, the points that stand for the distribution of x, and starting points of a fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from .model import DTYPE, Inputs, Model, Problem


@dataclass(frozen=True)
class Data:
    """R data sets of n rows: `inputs` with z (R, E, n), and `y` (R, q, n)."""

    inputs: Inputs
    y: Tensor

    @property
    def observations(self) -> int:
        """Numbers to fit in one data set: q n."""
        return self.y.shape[-2] * self.y.shape[-1]

    def head(self, n: int) -> "Data":
        """The first n rows of every data set."""
        return Data(self.inputs.part(torch.arange(len(self.y)), slice(n)), self.y[..., :n])


def seeds_of(seed: int, n: int, replicate: int) -> tuple[int, int]:
    """The seeds of replicate number `replicate` at sample size `n`: one for its data, one for its starting points."""
    data, starts = np.random.SeedSequence([seed, n, replicate]).generate_state(2)
    return int(data), int(starts)


def sample(setting: str, problem: Problem, n: int, seeds: Sequence[int]) -> Data:
    """One data set of n rows per seed: x uniform on the cube, y = f*(x) + N(0, noise^2 I)."""
    truth = Model(setting, problem, len(problem.bias))
    d, q = problem.B.shape[0], problem.C.shape[0]
    xs, noises = [], []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        xs.append(problem.radius * (2 * torch.rand(d, n, generator=g, dtype=DTYPE) - 1))
        noises.append(problem.noise * torch.randn(q, n, generator=g, dtype=DTYPE))
    inputs = truth.inputs(torch.stack(xs))
    return Data(inputs, truth.value(truth.truth(), inputs) + torch.stack(noises))


def noise_free(setting: str, problem: Problem, points: int = 4096) -> Data:
    """The population as one data set: f* at scrambled Sobol points of the cube, (1, d, points) and (1, q, points)."""
    truth = Model(setting, problem, len(problem.bias))
    sobol = SobolEngine(problem.B.shape[0], scramble=True, seed=0).draw(points, dtype=DTYPE)
    inputs = truth.inputs(problem.radius * (2 * sobol.T - 1).unsqueeze(0))
    return Data(inputs, truth.value(truth.truth(), inputs))


def near_truth(model: Model, seeds: Sequence[int], starts: int, scale: float = 0.3) -> Tensor:
    """Starting points (R, starts, P): the truth plus N(0, scale^2), drawn from one seed per data set.

    Where the model has more prompts than the problem, the surplus ones double the true ones in turn, from start to
    start, and the copies of a prompt share its weight equally.
    """
    exact = model.true()
    theta = exact.truth()
    alpha, atoms = theta[0], theta[exact.gated :].unflatten(0, (exact.length, exact.width))
    surplus = model.length - exact.length
    rows = []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        for start in range(starts):
            doubled = (start + torch.arange(surplus)) % exact.length
            source = torch.cat([torch.arange(exact.length), doubled])
            b = atoms[source, 0] - torch.bincount(source)[source].to(DTYPE).log()
            row = model.pack(alpha, b, atoms[source, 1:])
            rows.append(row + scale * torch.randn(row.shape, generator=g, dtype=DTYPE))
    return torch.stack(rows).unflatten(0, (len(seeds), starts))


def at_random(model: Model, seeds: Sequence[int], starts: int, gate: float = 0.0) -> Tensor:
    """Starting points (R, starts, P) that know nothing: atoms N(0, 1), b = 0 and tanh(alpha) = `gate`."""
    rows = []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        atoms = torch.randn(starts, model.length, model.width - 1, generator=g, dtype=DTYPE)
        alpha = torch.full((starts,), gate, dtype=DTYPE).atanh()
        rows.append(model.pack(alpha, torch.zeros(starts, model.length, dtype=DTYPE), atoms))
    return torch.stack(rows)
