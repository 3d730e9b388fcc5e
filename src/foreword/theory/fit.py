"""Least squares with many starts, over many data sets at once.

With Gaussian noise least squares is maximum likelihood. Each of R data sets is fitted from S starts; all R S problems
advance together, and the normal matrices J'J are summed over slices of rows that fit into the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import Data
from .lm import levenberg_marquardt
from .model import Model

SLICE_NUMBERS = 1 << 18  # entries of the Jacobian that are alive at a time, 2 MiB

Embedding = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(phi (F', K), which problems (F',)) -> theta (F', P) and dtheta/dphi (F', P, K): a surface to search."""


@dataclass(frozen=True)
class Fit:
    """The best of S starts of R data sets.

    `theta` (R, P) (or phi (R, K)), `rss` (R,) and `converged` (R,) are the best start's; `start_theta` (R, S, P),
    `start_rss` and `start_converged` (R, S) are every start's, and so is the number of `iterations` (R, S).
    """

    theta: Tensor
    rss: Tensor
    converged: Tensor
    start_theta: Tensor
    start_rss: Tensor
    start_converged: Tensor
    iterations: Tensor


def normal_equations(model: Model, data: Data, dataset: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|r|^2 (F,), J'r (F, P) and J'J (F, P, P) of the parameters theta (F, P) on the data sets `dataset` (F,)."""
    fits, width = theta.shape
    q, n = data.y.shape[-2:]
    rss = theta.new_zeros(fits)
    gradient = theta.new_zeros(fits, width)
    gram = theta.new_zeros(fits, width, width)
    rows = max(1, min(n, SLICE_NUMBERS // (q * width)))
    group = max(1, SLICE_NUMBERS // (q * width * rows))
    for some in torch.arange(fits).split(group):
        for first in range(0, n, rows):
            part = slice(first, first + rows)
            f, jacobian = model.value_and_jacobian(theta[some], data.inputs.part(dataset[some], part))
            residual = (f - data.y[dataset[some], :, part]).flatten(-2)  # (F', q n')
            jacobian = jacobian.flatten(-2)  # (F', P, q n')
            rss[some] += residual.square().sum(-1)
            gradient[some] += (jacobian @ residual.unsqueeze(-1)).squeeze(-1)
            gram[some] += jacobian @ jacobian.mT
    return rss, gradient, gram


def fit(
    model: Model,
    data: Data,
    starts: Tensor,
    embedding: Embedding | None = None,
    *,
    max_iterations: int = 200,
    tolerance: float = 1e-6,
) -> Fit:
    """The least-squares estimate of every data set: the smallest residual sum of squares over `starts` (R, S, P).

    With an `embedding` the search runs over the surface theta(phi): `starts` and the result's `theta` are then phi.
    """
    datasets, count = starts.shape[:2]
    dataset = torch.arange(datasets).repeat_interleave(count)

    def normal(point: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if embedding is None:
            return normal_equations(model, data, dataset[which], point)
        theta, slope = embedding(point, which)
        rss, gradient, gram = normal_equations(model, data, dataset[which], theta)
        return rss, (slope.mT @ gradient.unsqueeze(-1)).squeeze(-1), slope.mT @ gram @ slope

    found = levenberg_marquardt(
        normal, starts.flatten(0, 1), data.observations, max_iterations=max_iterations, tolerance=tolerance
    )
    theta, rss, converged, iterations = (
        values.unflatten(0, (datasets, count)) for values in (found.theta, found.rss, found.converged, found.iterations)
    )
    each, best = torch.arange(datasets), rss.argmin(-1)
    return Fit(theta[each, best], rss[each, best], converged[each, best], theta, rss, converged, iterations)
