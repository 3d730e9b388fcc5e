"""Values as the cells of a table: their text, what they sort by, and what the downloads hold."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .scales import minus, spelled

MISSING = "–"
LINE = 40  # characters of a text that a table shows in one line


class Cell(NamedTuple):
    """A cell's text and the number it sorts by: NaN for a missing value, None for text."""

    text: str
    value: float | None


class Column(NamedTuple):
    """A column of a table; its kind is "number" (aligned to the right), "prose" (breaks into lines) or "word"."""

    name: str
    kind: str
    cells: list[Cell]


def plain(value: Any) -> Any:
    """`value` as JSON has it: a tensor's or an array's item, None for NaN and ±∞, `str` of any other object."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def column(name: str, values: Iterable[Any], spec: str | None = None) -> Column:
    """The column of `values` (as `plain` gives them), its numbers written alike, or by the format string `spec`."""
    values = list(values)
    numbers = [
        part for value in values for part in (value if isinstance(value, tuple) else (value,)) if is_number(part)
    ]
    write = spec.format if spec else writer(numbers)
    cells = [cell(value, write) for value in values]
    if numbers and all(cell.value is not None for cell in cells):
        return Column(name, "number", cells)
    return Column(name, "prose" if any(len(cell.text) > LINE for cell in cells) else "word", cells)


def cell(value: Any, write: Callable[[float], str]) -> Cell:
    """(value, low, high) reads "82.1 ± 0.9" where the interval is even and "82.1 [80.9, 82.6]" where it is not."""
    if isinstance(value, tuple) and None not in value:
        middle, low, high = value
        below, above = write(middle - low), write(high - middle)
        text = f"{write(middle)} ± {above}" if below == above else f"{write(middle)} [{write(low)}, {write(high)}]"
        return Cell(text, middle)
    if isinstance(value, tuple):
        value = value[0]
    if value is None:
        return Cell(MISSING, math.nan)
    if is_number(value):
        return Cell(write(value), float(value))
    return Cell({True: "yes", False: "no"}[value] if isinstance(value, bool) else value, None)


def writer(numbers: list[float]) -> Callable[[float], str]:
    """How to write `numbers`, in one column: about four figures of the largest, and no zeros that all of them end in.

    A column of too many orders of magnitude, where this would leave the smallest under two figures, has each number
    written on its own.
    """
    if all(isinstance(number, int) for number in numbers):
        return lambda number: minus(f"{number:,}")
    sizes = [abs(number) for number in numbers if number]
    places = max(0, 3 - math.floor(math.log10(max(sizes)))) if sizes else 0
    if sizes and min(sizes) < 10.0 ** (1 - places):
        return spelled
    while places and all(round(number, places) == round(number, places - 1) for number in numbers):
        places -= 1
    return lambda number: minus(f"{number:,.{places}f}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
