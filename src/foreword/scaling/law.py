"""The parallel scaling law and its fit.

    L(N, P) = E + (A / (N · (1 + k ln P)))^α

for N parameters and P streams: P streams are worth a model of 1 + k ln P times the parameters (Chen et al. 2025,
Parallel Scaling Law for Language Models). The fit minimises the Huber loss (δ = 10⁻³) of the residuals of ln L by
L-BFGS from a grid of starts, as Hoffmann et al. 2022 fit theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from ..errors import ForewordError
from .rows import Row

DELTA = 1e-3
BILLION = 1e9
Array = NDArray[np.float64]

# Starts of (E as a share of the lowest loss, A in billions, α, k), all combinations.
STARTS = ((0.3, 0.6, 0.9), (0.001, 0.03, 1.0), (0.1, 0.2, 0.5), (0.05, 0.4))


@dataclass(frozen=True)
class Law:
    """L(N, P) = E + (A / (N · (1 + k ln P)))^α; A in parameters."""

    E: float
    A: float
    alpha: float
    k: float

    def loss(self, parameters: float, streams: int) -> float:
        return self.E + (self.A / (parameters * self.multiplier(streams))) ** self.alpha

    def multiplier(self, streams: int) -> float:
        """How many times the parameters P streams are worth: 1 + k ln P."""
        return 1 + self.k * math.log(streams)


@dataclass(frozen=True)
class Fit:
    """A fitted law, and how far it is from the rows.

    Attributes:
        law: the law.
        objective: mean Huber loss of the residuals of ln L.
        r2: explained share of the variance of the losses.
        largest_error: largest |predicted − observed| loss.
    """

    law: Law
    objective: float
    r2: float
    largest_error: float


@dataclass(frozen=True)
class Bootstrap:
    """95 % intervals (low, high) of each constant over resampled rows."""

    E: tuple[float, float]
    A: tuple[float, float]
    alpha: tuple[float, float]
    k: tuple[float, float]


@dataclass(frozen=True)
class HeldOut:
    """What a law predicts for rows that it was not fitted to.

    Attributes:
        what: which rows those were.
        law: fitted to the others.
        bias: mean of predicted − observed loss.
        largest_error: largest |predicted − observed| loss.
    """

    what: str
    law: Law
    bias: float
    largest_error: float


def fit(rows: Sequence[Row]) -> Fit:
    """Fit the law. Raises `ForewordError` for fewer rows than constants, one size or one number of streams."""
    _require_spread(rows)
    n, p, loss = _arrays(rows)
    lowest = float(loss.min())
    starts = [(share * lowest, math.log(a), alpha, k) for share, a, alpha, k in itertools.product(*STARTS)]
    best, objective = _minimise(n, p, loss, starts)
    predicted = _predict(best, n, p)
    residual = predicted - loss
    return Fit(
        _law(best),
        objective,
        float(1 - (residual**2).sum() / ((loss - loss.mean()) ** 2).sum()),
        float(np.abs(residual).max()),
    )


def bootstrap(rows: Sequence[Row], law: Law, resamples: int = 500, seed: int = 0) -> Bootstrap:
    """Intervals of the constants of `law`, the fit of `rows`: percentiles over fits of rows drawn with replacement."""
    n, p, loss = _arrays(rows)
    generator = np.random.default_rng(seed)
    centre = (law.E, math.log(law.A / BILLION), law.alpha, law.k)
    starts = [centre, (0.8 * law.E, *centre[1:])]
    laws: list[Law] = []
    while len(laws) < resamples:
        chosen = generator.integers(len(rows), size=len(rows))
        if len(set(p[chosen])) > 1 and len(set(n[chosen])) > 1:
            laws.append(_law(_minimise(n[chosen], p[chosen], loss[chosen], starts)[0]))
    intervals = {
        name: tuple(np.percentile([getattr(one, name) for one in laws], (2.5, 97.5)).tolist())
        for name in ("E", "A", "alpha", "k")
    }
    return Bootstrap(**intervals)


def held_out(rows: Sequence[Row]) -> list[HeldOut]:
    """Leave out the rows with the most streams, then those with the most parameters; fit the others and predict."""
    most = max(row.streams for row in rows)
    checks = [_held_out(f"P = {most}", rows, [row.streams == most for row in rows])]
    per_stream: dict[int, float] = {}
    for row in rows:
        per_stream[row.streams] = max(row.parameters, per_stream.get(row.streams, 0))
    largest = [row.parameters == per_stream[row.streams] for row in rows]
    checks.append(_held_out(f"N = {min(per_stream.values()) / BILLION:.3g} B, the largest", rows, largest))
    return checks


def _held_out(what: str, rows: Sequence[Row], left_out: Sequence[bool]) -> HeldOut:
    law = fit([row for row, out in zip(rows, left_out, strict=True) if not out]).law
    errors = [law.loss(row.parameters, row.streams) - row.loss for row, out in zip(rows, left_out, strict=True) if out]
    return HeldOut(what, law, float(np.mean(errors)), float(np.abs(errors).max()))


# ---------------------------------------------------------------------------------------------------------------------
# The constants as a vector (E, ln A, α, k), A in billions


def _predict(constants: Array, n: Array, p: Array) -> Array:
    e, log_a, alpha, k = constants
    return e + np.exp(alpha * (log_a - np.log(n * (1 + k * np.log(p)))))


def _objective(constants: Array, n: Array, p: Array, loss: Array) -> tuple[float, Array]:
    """Mean Huber loss of ln L̂ − ln L over δ², and its gradient."""
    e, log_a, alpha, k = constants
    worth = 1 + k * np.log(p)
    log_ratio = log_a - np.log(n * worth)
    term = np.exp(alpha * log_ratio)
    predicted = e + term
    residual = (np.log(predicted) - np.log(loss)) / DELTA
    small = np.abs(residual) <= 1
    huber = np.where(small, residual**2 / 2, np.abs(residual) - 0.5)
    slope = np.clip(residual, -1, 1) / (DELTA * predicted * len(n))
    gradient = np.array(
        [
            slope.sum(),
            (slope * term * alpha).sum(),
            (slope * term * log_ratio).sum(),
            -(slope * term * alpha * np.log(p) / worth).sum(),
        ]
    )
    return float(huber.mean()), gradient


def _minimise(n: Array, p: Array, loss: Array, starts: Sequence[tuple[float, ...]]) -> tuple[Array, float]:
    """The constants of the best of the minimisations from `starts`, and its mean Huber loss."""
    bounds = [(1e-6, float(loss.min())), (-25.0, 10.0), (1e-3, 3.0), (0.0, 10.0)]
    options = {"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-9}
    runs = [
        minimize(_objective, start, (n, p, loss), "L-BFGS-B", jac=True, bounds=bounds, options=options)
        for start in starts
    ]
    best = min(runs, key=lambda run: run.fun)
    return best.x, float(best.fun) * DELTA**2


def _law(constants: Array) -> Law:
    e, log_a, alpha, k = (float(x) for x in constants)
    return Law(e, math.exp(log_a) * BILLION, alpha, k)


def _arrays(rows: Sequence[Row]) -> tuple[Array, Array, Array]:
    """N in billions, P, L."""
    n = np.array([row.parameters for row in rows]) / BILLION
    return n, np.array([float(row.streams) for row in rows]), np.array([row.loss for row in rows])


def _require_spread(rows: Sequence[Row]) -> None:
    if len(rows) < 5:
        raise ForewordError(f"the law has 4 constants; {len(rows)} rows are too few to fit it, give 5 or more")
    spread: dict[str, set[float]] = {"parameters": {r.parameters for r in rows}, "streams": {r.streams for r in rows}}
    for name, values in spread.items():
        if len(values) < 2:
            raise ForewordError(f"all rows have the same {name} ({values.pop():g}); the fit needs at least two values")
