"""Axes: which values can be drawn, where they fall on the paper, and where the ticks stand."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

LARGEST = 1e200  # beyond it a span could overflow
SMALLEST = 1e-200  # below it a step could underflow
FINEST = 1e-9  # the smallest span, relative to the values, that ticks can still tell apart
SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """The map from values in [low, high] to positions in [start, end], in SVG units, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            low = math.log(self.low)
            share = (math.log(value) - low) / (math.log(self.high) - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """About `count` round values within [low, high], with their labels, in increasing order."""
        values = log_ticks(self.low, self.high, count) if self.log else []
        if values:
            return [(value, compact(value)) for value in values]
        values = linear_ticks(self.low, self.high, count)
        return list(zip(values, tick_labels(values), strict=True))


def drawable(value: float, log: bool) -> bool:
    """Whether an axis can show `value`: finite, and positive on a logarithmic axis."""
    return SMALLEST <= value <= LARGEST if log else abs(value) <= LARGEST


def domain(values: Iterable[float], log: bool = False, zero: bool = False, pad: float = 0.0) -> tuple[float, float]:
    """The range [low, high], low < high, of an axis that shows `values`.

    Values that cannot be drawn are left out; no value at all gives [0, 1], or [1, 10] on a logarithmic axis. A range
    too narrow for ticks is widened. `pad` adds that share of the range on both sides. `zero` starts a linear axis at 0
    when the values stand near it (the lowest is under a third of the highest), so that heights can be compared.
    """
    kept = [value for value in values if drawable(value, log)]
    low, high = (min(kept), max(kept)) if kept else (1.0, 10.0) if log else (0.0, 1.0)
    if log:
        decades = math.log10(high) - math.log10(low)
        margin = 10 ** (pad * decades if decades > FINEST else 0.5)
        return low / margin, high * margin
    magnitude = max(abs(low), abs(high))
    if magnitude < SMALLEST:
        return (0.0, 1.0) if zero and low >= 0 else (-1.0, 1.0)
    if high - low < FINEST * magnitude:
        low, high = low - magnitude / 10, high + magnitude / 10
    margin = pad * (high - low)
    if zero and 0 <= low < high / 3:
        return 0.0, high + margin
    if zero and low / 3 < high <= 0:
        return low - margin, 0.0
    return low - margin, high + margin


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], about `count` of them."""
    raw = (high - low) / count
    exponent = math.floor(math.log10(raw))
    # Half again as wide as asked for is still dense enough for two ticks where count is 3.
    mantissa = max(one for one in (1, 2, 5, 10) if one <= 1.5 * raw / 10.0**exponent)
    step = float(f"{mantissa}e{exponent}")
    first, last = math.ceil(low / step - FINEST), math.floor(high / step + FINEST)
    # float("15e-1") is the double nearest to 1.5; 15 * 0.1 is not
    return [float(f"{index * mantissa}e{exponent}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten within [low, high], with 2s and 5s or 3s between where there is room, about `count` of them.

    None on a range that holds fewer than two; linear ticks serve it better.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        ticks = [tick for decade in decades for m in mantissas if low <= (tick := float(f"{m}e{decade}")) <= high]
        if len(ticks) <= count + 1:
            return ticks if len(ticks) > 1 else []
    return ticks[:: math.ceil(len(ticks) / count)]


def compact(value: float) -> str:
    """`value` in a few characters: 0.05, 10k, 1.5M, 2e-5."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if 1e3 <= abs(value) < 1e15:
        unit, suffix = next(pair for pair in SUFFIXES if abs(value) >= pair[0])
        return minus(f"{value / unit:.4g}{suffix}")
    if 1e-3 <= abs(value) < 1e3:
        return minus(f"{value:.4g}")
    return scientific(value, 3)


def spelled(value: float) -> str:
    """`value` for reading on its own: as `compact`, but whole from a thousand on: 12,345."""
    return minus(f"{value:,.0f}") if 1e3 <= abs(value) < 1e15 else compact(value)


def tick_labels(ticks: list[float]) -> list[str]:
    """Labels of evenly spaced `ticks`, all in one unit and with one number of decimals, and all different."""
    if len(ticks) < 2:
        return [compact(tick) for tick in ticks]
    step, largest = ticks[1] - ticks[0], max(abs(ticks[0]), abs(ticks[-1]))
    if largest >= 1e15 or largest < 1e-3:
        digits = math.floor(math.log10(largest)) - math.floor(math.log10(step) + FINEST)
        return ["0" if tick == 0 else scientific(tick, max(digits, 0)) for tick in ticks]
    unit, suffix = next((pair for pair in SUFFIXES if largest >= max(pair[0], 1e4)), (1.0, ""))
    if step < unit / 1000:
        unit, suffix = 1.0, ""
    decimals = max(0, -math.floor(math.log10(step / unit) + FINEST))
    return ["0" if tick == 0 else minus(f"{tick / unit:,.{decimals}f}{suffix}") for tick in ticks]


def scientific(value: float, digits: int) -> str:
    """`value` as 2e-5 or 1.25e18, with at most `digits` decimals."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return minus(f"{mantissa}e{int(exponent)}")


def minus(text: str) -> str:
    """`text` with a true minus sign in front (the exponent keeps its hyphen)."""
    return text.replace("-", "−", 1) if text.startswith("-") else text
