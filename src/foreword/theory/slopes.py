"""Rates from errors: log-log regression with bootstrap intervals."""

import math
import re
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from ..errors import ForewordError
from .tables import numbers


class Slope(TypedDict):
    """The exponent of a power law and its 95 % interval; None where a median is 0 or infinite and has no logarithm."""

    slope: float | None
    low: float | None
    high: float | None


def log_log_slope(
    n: Sequence[int], errors: Sequence[Sequence[float | None]], *, draws: int = 1000, seed: int = 0
) -> Slope:
    """The slope of log median error on log n by ordinary least squares.

    `errors[i]` are the replicates' errors at `n[i]`; None stands for an infinite one. The interval is the 2.5 and 97.5
    percentile of `draws` bootstrap slopes, each from replicates drawn anew with replacement at every n.
    """
    if len(n) < 2:
        return Slope(slope=None, low=None, high=None)
    log_n = np.log(np.asarray(n, dtype=float))
    weight = (log_n - log_n.mean()) / ((log_n - log_n.mean()) ** 2).sum()
    g = np.random.default_rng(seed)
    middle, drawn = [], []
    for row in map(numbers, errors):
        middle.append(np.median(row))
        drawn.append(np.median(row[g.integers(len(row), size=(draws, len(row)))], axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = float(weight @ np.log(middle))
        slopes = weight @ np.log(drawn)
    if not math.isfinite(slope):
        return Slope(slope=None, low=None, high=None)
    if not np.isfinite(slopes).all():
        return Slope(slope=slope, low=None, high=None)
    low, high = np.percentile(slopes, [2.5, 97.5])
    return Slope(slope=slope, low=float(low), high=float(high))


def sample_sizes(n: str | Sequence[int]) -> list[int]:
    """The sample sizes that "100..100000" stands for (1, 2 and 5 of each decade and the ends), or those given.

    Raises `ForewordError` where `n` is neither, or holds a number below 10.
    """
    if isinstance(n, str):
        ends = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", n)
        if not ends or int(ends[1]) > int(ends[2]) or int(ends[1]) < 1:
            raise ForewordError(f"n is {n!r}: give a range such as 100..100000, or a list of sample sizes")
        first, last = int(ends[1]), int(ends[2])
        decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
        ladder = {step * 10**decade for decade in decades for step in (1, 2, 5)}
        n = sorted({first, last} | {size for size in ladder if first <= size <= last})
    sizes = sorted(set(n))
    if not sizes or sizes[0] < 10:
        raise ForewordError(f"n is {n!r}: give sample sizes of 10 and more")
    return sizes
