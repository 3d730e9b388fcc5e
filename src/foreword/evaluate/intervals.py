"""How sure a score is: intervals of one, and of the difference of two that were measured on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
Z95 = 1.959964  # the 97.5 % point of the normal distribution
CHUNK = 1_000  # resamples computed at a time


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """A minus B with its 95 % interval, and the two-sided bootstrap p-value of no difference."""

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
    return crossed_mean([values], seed)


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Interval:
    """Σ numerators / Σ denominators over the same N items, with the percentile interval of drawing the items again."""
    over, under = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    items = len(over)
    counts = np.random.default_rng(seed).multinomial(items, np.full(items, 1 / items), RESAMPLES)  # (RESAMPLES, N)
    low, high = np.quantile((counts @ over) / (counts @ under), [0.025, 0.975])
    return Interval(float(over.sum() / under.sum()), float(low), float(high))


def crossed_mean(scores: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """The mean of scores (S, N), of S runs with different seeds on the same N items, under resampling of both."""
    table = np.asarray(scores, dtype=float)
    low, high = np.quantile(resampled_means(table, seed), [0.025, 0.975])
    return Interval(float(table.mean()), float(low), float(high))


def paired(scores: Sequence[Sequence[float]], others: Sequence[Sequence[float]], seed: int = 0) -> Difference:
    """The paired bootstrap of two methods: scores (S, N) minus others (S, N), with the same seeds and items.

    Seeds and items are resampled together for both methods, so what they share (hard items, a lucky subset of the
    data) cancels. p is twice the smaller tail of the resampled differences beyond 0 (Efron & Tibshirani 1993, ch. 15),
    at least 2 / (resamples + 1).
    """
    table = np.asarray(scores, dtype=float) - np.asarray(others, dtype=float)
    means = resampled_means(table, seed)
    low, high = np.quantile(means, [0.025, 0.975])
    tail = min((means <= 0).sum(), (means >= 0).sum())
    p = min(1.0, 2 * (1 + int(tail)) / (RESAMPLES + 1))
    return Difference(float(table.mean()), float(low), float(high), p)


def resampled_means(table: np.ndarray, seed: int) -> np.ndarray:
    """Means (RESAMPLES,) of a table (S, N) whose rows and columns are both drawn again with replacement.

    A bootstrap of S rows has S − 1 over S of the variance between them, far too little for three seeds; their weights
    are therefore spread out by √(S / (S − 1)) around 1/S. With one row only the columns are resampled.
    """
    draw = np.random.default_rng(seed)
    rows, columns = table.shape
    means = []
    for _ in range(RESAMPLES // CHUNK):
        over_rows = draw.multinomial(rows, np.full(rows, 1 / rows), CHUNK) / rows  # (CHUNK, S)
        if rows > 1:
            over_rows = 1 / rows + math.sqrt(rows / (rows - 1)) * (over_rows - 1 / rows)
        over_columns = draw.multinomial(columns, np.full(columns, 1 / columns), CHUNK) / columns  # (CHUNK, N)
        means.append(((over_rows @ table) * over_columns).sum(1))
    return np.concatenate(means)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjustment for asking several questions at once: p-values that keep the family-wise error."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
