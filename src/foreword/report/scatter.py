"""Points with their names: accuracy against parameters, accuracy against time, and the frontier of the best."""

from collections.abc import Mapping
from typing import Literal

from markupsafe import Markup

from .marks import classes, group, legend, marker, words
from .plot import NARROW, WIDE, Axis, Chart, Plot, Point, Size, hint, record, visible

Better = Literal["higher", "lower"]
Labelled = list[tuple[str, Point]]
Box = tuple[float, float, float, float]  # left, top, right, bottom

FEW = 24  # up to this many points of different names can carry their names in the drawing
CHARACTER, LINE = 6.8, 15.0  # the room that a name takes in the drawing, in SVG units
REACH = 9.0  # between a point and its name


def scatter(points: Labelled, slots: Mapping[str, int], x: str, y: str, log: str, frontier: Better | None) -> Chart:
    """A chart of labelled points with their intervals in y, and the frontier through the best (see `frontier_of`)."""
    logs = ("x" in log, "y" in log)
    shown = [(label, point) for label, point in points if visible(point, *logs)]
    best = frontier_of(shown, frontier) if frontier else []
    heights = [value for _, point in shown for value in (point.y, point.low, point.high)]
    x_axis = Axis(x, [point.x for _, point in shown], log=logs[0], pad=0.08)
    y_axis = Axis(y, heights, log=logs[1], pad=0.08)
    # A wide drawing names its points itself when every name finds room; a narrow one always needs the legend.
    names = named_points(shown, best, Plot.of(WIDE, x_axis, y_axis)) if len(slots) == len(points) <= FEW else []
    named = 0 < len(names) == len(shown)

    def draw(size: Size) -> Markup:
        plot = Plot.of(size, x_axis, y_axis)
        marks = [stairs([point for _, point in best], plot)] if best else []
        for label, point in shown:
            left, top = plot.x(point.x), plot.y(point.y)
            mark = marker(slots[label], left, top, hint(label, point, x, y))
            marks.append(group(classes(slots[label]), [whisker(point, plot), mark]))
        return plot.frame() + Markup("").join(marks + (names if named and size is WIDE else []))

    on_frontier = f"; on the frontier: {', '.join(label for label, _ in best)}" if best else ""
    return Chart(
        alt=f"Scatter chart of {y} against {x}, {len(shown)} points{on_frontier}.",
        draw=draw,
        sizes=(WIDE, NARROW) if shown else (),
        records=[{"label": label, **record(point, x, y)} for label, point in points],
        legend=legend(slots, lines=False, css="narrow" if named else ""),
        undrawn=len(points) - len(shown),
    )


def frontier_of(points: Labelled, better: Better) -> Labelled:
    """The points that none with a smaller or equal x equals or beats in y, from the smallest x to the largest."""
    sign = 1 if better == "higher" else -1
    best: Labelled = []
    for label, point in sorted(points, key=lambda pair: (pair[1].x, -sign * pair[1].y)):
        if not best or sign * point.y > sign * best[-1][1].y:
            best.append((label, point))
    return best


def stairs(points: list[Point], plot: Plot) -> Markup:
    """The frontier as steps: what the best point so far reaches at each x."""
    steps = "".join(f"H{plot.x(point.x):.1f}V{plot.y(point.y):.1f}" for point in points[1:])
    start = f"M{plot.x(points[0].x):.1f} {plot.y(points[0].y):.1f}"
    return Markup('<path class="frontier" d="{}{}H{:.1f}"/>').format(start, steps, plot.x.end)


def whisker(point: Point, plot: Plot) -> Markup:
    """The interval of `point` as a vertical line."""
    if not point.low <= point.high:
        return Markup("")
    ends = plot.x(point.x), plot.clamped(point.low), plot.clamped(point.high)
    return Markup('<path class="whisker" d="M{:.1f} {:.1f}V{:.1f}"/>').format(*ends)


def named_points(points: Labelled, best: Labelled, plot: Plot) -> list[Markup]:
    """A name beside each point, where one finds room clear of the points, their intervals, the frontier `best` and
    the names before it."""
    taken = obstacles(points, best, plot)
    names = []
    for name, point in points:
        left, top, width = plot.x(point.x), plot.y(point.y), CHARACTER * len(name)
        for side, rise in ((1, 0), (-1, 0), (-1, -1), (1, 1), (1, -1), (-1, 1)):
            x, y = left + side * REACH, top + rise * LINE * 0.8
            start = x if side > 0 else x - width
            box = (start, y - LINE / 2, start + width, y + LINE / 2)
            if inside(box, plot) and not any(overlap(box, other) for other in taken):
                taken.append(box)
                names.append(words(x, y + 4, "start" if side > 0 else "end", name, "point"))
                break
    return names


def obstacles(points: Labelled, best: Labelled, plot: Plot) -> list[Box]:
    """The boxes that names keep clear of: marks, intervals and the steps of the frontier."""
    boxes = []
    for _, point in points:
        x, y = plot.x(point.x), plot.y(point.y)
        ends = (plot.clamped(point.high), plot.clamped(point.low)) if point.low <= point.high else (y, y)
        boxes += [(x - 5, y - 5, x + 5, y + 5), (x - 1, ends[0], x + 1, ends[1])]
    corners = [(plot.x(point.x), plot.y(point.y)) for _, point in best]
    for (x, y), (next_x, next_y) in zip(
        corners, [*corners[1:], (plot.x.end, corners[-1][1])] if corners else [], strict=True
    ):
        boxes += [(x, y - 1, next_x, y + 1), (next_x - 1, min(y, next_y), next_x + 1, max(y, next_y))]
    return boxes


def inside(box: Box, plot: Plot) -> bool:
    return box[0] >= plot.x.start and box[2] <= plot.size.width and box[1] >= plot.y.end and box[3] <= plot.y.start


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
