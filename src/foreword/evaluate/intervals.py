"""How sure a score is: intervals of one, and of the difference of two that were measured on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

RESAMPLES = 10_000
Z95 = 1.959964  # the 97.5 % point of the normal distribution


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """A minus B with its 95 % interval, and the two-sided p-value of no difference."""

    value: float
    low: float
    high: float
    p: float

    @property
    def half_width(self) -> float:
        """Half the interval's length: the number after ±."""
        return (self.high - self.low) / 2


def proportion(values: Sequence[float]) -> Interval:
    """The share of ones among zeros and ones, with Wilson's (1927) score interval: right for few values and near 0."""
    trials = len(values)
    p, spread = sum(values) / trials, Z95**2 / trials
    centre = (p + spread / 2) / (1 + spread)
    reach = Z95 * math.sqrt(p * (1 - p) / trials + spread / (4 * trials)) / (1 + spread)
    return Interval(p, max(0.0, centre - reach), min(1.0, centre + reach))


def mean(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean of one measure over items, with a bootstrap's percentile interval."""
    return ratio(values, [1.0] * len(values), seed)


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Interval:
    """Σ numerators / Σ denominators over the same N items, with the percentile interval of drawing the items again."""
    over, under = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    items = len(over)
    counts = np.random.default_rng(seed).multinomial(items, np.full(items, 1 / items), RESAMPLES)  # (RESAMPLES, N)
    low, high = np.quantile((counts @ over) / (counts @ under), [0.025, 0.975])
    return Interval(float(over.sum() / under.sum()), float(low), float(high))


def crossed_mean(scores: Sequence[Sequence[float]]) -> Interval:
    """The mean of scores (S, N), of S runs with different seeds on the same N items, where both might have been others.

    The interval is Student's (see `_spread`), within [0, 1] where all scores are.
    """
    table = np.asarray(scores, dtype=float)
    value, (error, freedom) = float(table.mean()), _spread(table)
    reach = error * float(stdtrit(freedom, 0.975))
    low, high = (0.0, 1.0) if table.min() >= 0 and table.max() <= 1 else (-math.inf, math.inf)
    return Interval(value, max(low, value - reach), min(high, value + reach))


def paired(scores: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Difference:
    """Two methods on the same items with the same seeds: scores (S, N) minus others (S, N), by a paired t-test.

    What the methods share (hard items, a lucky subset of the data) cancels in the differences, of which seeds and items
    might both have been others (see `_spread`). p is at least that of N differences of one sign, 2^(1 − N).
    """
    table = np.asarray(scores, dtype=float) - np.asarray(others, dtype=float)
    value, (error, freedom) = float(table.mean()), _spread(table)
    reach = error * float(stdtrit(freedom, 0.975))
    p = float(2 * stdtr(freedom, -abs(value) / error)) if error else float(value == 0)
    return Difference(value, value - reach, value + reach, max(p, 2.0 ** (1 - table.shape[1])))


def _spread(table: np.ndarray) -> tuple[float, float]:
    """The standard error of the mean of a table (S, N), and its degrees of freedom, where rows and columns are random.

        x_sn = μ + a_s + b_n + e_sn        Var x̄ = (MS_a + MS_b − MS_e) / (S·N),

    with the mean squares of the two-way analysis of variance, and never below MS_e / (S·N); the degrees of freedom are
    Satterthwaite's (1946). One row leaves MS_b / N: Student's own. A bootstrap of few rows has too thin tails for this.
    """
    rows, columns = table.shape
    of_rows, of_columns = (table.mean(axis, keepdims=True) - table.mean() for axis in (1, 0))
    effects = [of_rows, of_columns, table - table.mean() - of_rows - of_columns]
    freedoms = [rows - 1, columns - 1, (rows - 1) * (columns - 1)]
    squares = [  # MS of rows, columns and what is left
        (np.broadcast_to(effect, table.shape) ** 2).sum() / freedom if freedom else 0.0
        for effect, freedom in zip(effects, freedoms, strict=True)
    ]
    variance = max(squares[0] + squares[1] - squares[2], squares[2])
    shares = sum(square**2 / freedom for square, freedom in zip(squares, freedoms, strict=True) if freedom)
    return math.sqrt(variance / table.size), variance**2 / shares if shares else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjustment for asking several questions at once: p-values that keep the family-wise error."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
