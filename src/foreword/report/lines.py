"""Curves with bands: loss against steps, accuracy against the share of the data, error against n."""

from collections.abc import Collection, Iterator, Mapping

from markupsafe import Markup

from .marks import classes, group, legend, marker
from .plot import NARROW, WIDE, Axis, Chart, Plot, Point, Size, hint, record, visible
from .scales import spelled

FEW = 60  # a curve of at most this many points shows every one with a mark
Series = Mapping[str, list[Point]]


def lines(series: Series, slots: Mapping[str, int], x: str, y: str, log: str, dashed: Collection[str]) -> Chart:
    """A chart of each series' y against x, sorted by x; `low` and `high` make a band, a NaN makes a gap."""
    logs = ("x" in log, "y" in log)
    curves = {name: sorted(points, key=lambda point: point.x) for name, points in series.items()}
    shown = [point for points in curves.values() for point in points if visible(point, *logs)]
    heights = [value for point in shown for value in (point.y, point.low, point.high)]
    x_axis = Axis(x, [point.x for point in shown], log=logs[0])
    y_axis = Axis(y, heights, log=logs[1], zero=True, pad=0.05)

    def draw(size: Size) -> Markup:
        plot = Plot.of(size, x_axis, y_axis)
        bands, strokes = Markup(""), Markup("")
        for name, points in curves.items():
            css = classes(slots[name], name in dashed)
            runs = list(unbroken(points, plot))
            bands += group(css, [band(run, plot) for run in runs if any(point.low <= point.high for point in run)])
            marks = [stroke(run, name, plot) for run in runs if len(run) > 1]
            marked = [] if name in dashed else marked_points(runs)
            marks += [marker(slots[name], plot.x(p.x), plot.y(p.y), hint(name, p, x, y)) for p in marked]
            strokes += group(css, marks)
        return plot.frame() + bands + strokes

    ends = [
        f"{name} from {spelled(kept[0].y)} to {spelled(kept[-1].y)}"
        for name, points in curves.items()
        if (kept := [point for point in points if visible(point, *logs)])
    ]
    return Chart(
        alt=f"Line chart of {y} against {x}: {'; '.join(ends) or 'no data'}.",
        draw=draw,
        sizes=(WIDE, NARROW) if shown else (),
        records=[{"series": name, **record(point, x, y)} for name, points in series.items() for point in points],
        legend=legend(slots, dashed=dashed) if len(slots) > 1 else Markup(""),
        undrawn=sum(map(len, curves.values())) - len(shown),
    )


def unbroken(points: list[Point], plot: Plot) -> Iterator[list[Point]]:
    """The stretches of `points` between those that can't be drawn, thinned to what the paper can show."""
    run: list[Point] = []
    for point in points:
        if visible(point, plot.x.log, plot.y.log):
            run.append(point)
        elif run:
            yield thin(run, plot)
            run = []
    if run:
        yield thin(run, plot)


def thin(points: list[Point], plot: Plot) -> list[Point]:
    """The first, lowest, highest and last point of each column of one unit, in order.

    These four draw the same picture as all of them (M4 aggregation: Jugel et al., VLDB 2014).
    """
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(round(plot.x(point.x)), []).append(point)
    kept: list[Point] = []
    for column in columns.values():
        if len(column) <= 4:
            kept += column
            continue
        heights = [point.y for point in column]
        chosen = {0, heights.index(min(heights)), heights.index(max(heights)), len(column) - 1}
        kept += [column[index] for index in sorted(chosen)]
    return kept


def marked_points(runs: list[list[Point]]) -> list[Point]:
    """All points of a short curve; of a long one the last, and those that stand alone between gaps."""
    if sum(map(len, runs)) <= FEW:
        return [point for run in runs for point in run]
    return [run[-1] for run in runs if run is runs[-1] or len(run) == 1]


def stroke(points: list[Point], name: str, plot: Plot) -> Markup:
    path = "L".join(f"{plot.x(point.x):.1f} {plot.y(point.y):.1f}" for point in points)
    return Markup('<path class="line" d="M{}"><title>{}</title></path>').format(path, name)


def band(points: list[Point], plot: Plot) -> Markup:
    """The area between `low` and `high`; it closes on the curve at a point without an interval."""
    upper, lower = [], []
    for point in points:
        low, high = (point.low, point.high) if point.low <= point.high else (point.y, point.y)
        upper.append(f"{plot.x(point.x):.1f} {plot.clamped(high):.1f}")
        lower.append(f"{plot.x(point.x):.1f} {plot.clamped(low):.1f}")
    return Markup('<path class="band" d="M{}Z"/>').format("L".join(upper + lower[::-1]))
