"""The frame of a chart of x against y: grid, ticks, labels, and the box that the marks are drawn in."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from .marks import CHARACTER, words
from .scales import Scale, domain, drawable, spelled


class Size(NamedTuple):
    """The paper a chart is drawn on, in SVG units."""

    width: int
    height: int


# Every chart is drawn for a screen and again for a phone, and the style sheet shows the one that fits.
WIDE = Size(800, 380)
NARROW = Size(360, 300)
Y_TICKS = 6


class Point(NamedTuple):
    """A value with its interval; `low` and `high` are NaN where there is none."""

    x: float
    y: float
    low: float
    high: float


class Axis(NamedTuple):
    """What an axis shows: its name, its values, and how they are laid out (see `scales.domain`)."""

    name: str
    values: list[float]
    log: bool = False
    zero: bool = False
    pad: float = 0.0


@dataclass(frozen=True)
class Plot:
    """A box on `size` with an x and a y scale."""

    size: Size
    x: Scale
    y: Scale
    x_name: str
    y_name: str

    @classmethod
    def of(cls, size: Size, x: Axis, y: Axis, foot: float = 24) -> "Plot":
        """Scales that show the values of both axes, with room for the y labels, and `foot` for the x labels."""
        top, bottom = 26, size.height - foot - 20
        y_scale = Scale(*domain(y.values, y.log, y.zero, y.pad), bottom, top, y.log)
        widest = max((len(label) for _, label in y_scale.ticks(Y_TICKS)), default=1)
        left, right = 14 + CHARACTER * widest, size.width - 16
        return cls(size, Scale(*domain(x.values, x.log, x.zero, x.pad), left, right, x.log), y_scale, x.name, y.name)

    def x_ticks(self) -> list[tuple[float, str]]:
        """As many ticks of the x axis, as (position, label), as have room for their labels."""
        for count in range(max(3, int(self.x.end - self.x.start) // 75), 1, -1):
            ticks = [(self.x(value), text) for value, text in self.x.ticks(count)]
            if all(there - here >= CHARACTER * (len(a) + len(b)) / 2 + 10 for (here, a), (there, b) in pairwise(ticks)):
                break
        return ticks

    def clamped(self, value: float) -> float:
        """The height of `value`, or of the edge of the box where it lies beyond."""
        return self.y(min(max(value, self.y.low), self.y.high))

    def frame(self, x_ticks: Iterable[tuple[float, str]] | None = None) -> Markup:
        """Grid lines, tick labels and the names of the axes; `x_ticks` (position, label) replaces the x scale's own."""
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        parts = []
        for value, text in self.y.ticks(Y_TICKS):
            at = self.y(value)
            parts.append(Markup('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>').format(left, at, right))
            parts.append(words(left - 8, at + 4, "end", text))
        for at, text in self.x_ticks() if x_ticks is None else x_ticks:
            parts.append(Markup('<path class="tick" d="M{:.1f} {:.1f}v5"/>').format(at, bottom))
            parts.append(words(at, bottom + 19, "middle", text))
        parts.append(Markup('<path class="axis" d="M{:.1f} {:.1f}H{:.1f}"/>').format(left, bottom, right))
        parts.append(words(0, top - 14, "start", self.y_name, "name"))
        parts.append(words(right, self.size.height - 6, "end", self.x_name, "name"))
        return Markup("").join(parts)


@dataclass(frozen=True)
class Chart:
    """What a chart module hands to the page: how to draw it, and what stands around the drawing."""

    alt: str  # the chart in words, for those who can't see it
    draw: Callable[[Size], Markup]
    sizes: tuple[Size, ...]  # one, a wide and a narrow one, or none where there is nothing to draw
    records: list[dict[str, Any]]  # the data, as the downloads give them
    legend: Markup
    undrawn: int = 0  # values that the axes can't show
    half: bool = False  # whether the next chart may stand beside it


def visible(point: Point, log_x: bool, log_y: bool) -> bool:
    """Whether the axes can show `point`."""
    return drawable(point.x, log_x) and drawable(point.y, log_y)


def record(point: Point, x: str, y: str) -> dict[str, float]:
    """`point` as the downloads give it."""
    interval = {"low": point.low, "high": point.high} if point.low <= point.high else {}
    return {x: point.x, y: point.y, **interval}


def hint(name: str, point: Point, x: str, y: str) -> str:
    """The tooltip of `point`: the series, both values, and the interval where there is one."""
    interval = f" [{spelled(point.low)}, {spelled(point.high)}]" if point.low <= point.high else ""
    return f"{name}\n{x}: {spelled(point.x)}\n{y}: {spelled(point.y)}{interval}"
