"""Grouped bars: one value of each series in each category, for example the attention mass of a layer."""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from .marks import CHARACTER, classes, group, legend
from .plot import NARROW, WIDE, Axis, Chart, Plot, Size
from .scales import drawable, spelled

GAP = 0.28  # share of a category's width between its bars and the next category's
LONGEST = 22  # characters of a slanted label
SLOPE = 0.6  # rise of a slanted label over its length


def bars(
    series: Mapping[str, list[float]], categories: Sequence[str], slots: Mapping[str, int], x: str, y: str
) -> Chart:
    """A chart of vertical bars from zero, side by side within each category."""
    values = [value for heights in series.values() for value in heights]
    shown = [value for value in values if drawable(value, log=False)]
    y_axis = Axis(y, [0.0, *shown], zero=True, pad=0.05)  # bars start at zero whatever the values are
    x_axis = Axis(x, [0.0, float(max(len(categories), 1))])
    room = CHARACTER * min(max(map(len, categories), default=0), LONGEST)

    def draw(size: Size) -> Markup:
        # Labels that find no room stand aslant; numbers, which a reader can count on from, are left out instead.
        aslant = room + 8 > size.width / len(categories) and not all(map(str.isdecimal, categories))
        plot = Plot.of(size, x_axis, y_axis, foot=16 + room * SLOPE if aslant else 24)
        step = plot.x(1) - plot.x(0)
        width = step * (1 - GAP) / len(series)
        stride = 1 if aslant else math.ceil((room + 8) / step)
        centres = [plot.x(index + 0.5) for index in range(len(categories))]
        labels = [(centres[index], "" if aslant else categories[index]) for index in range(0, len(categories), stride)]
        groups = []
        for order, (name, heights) in enumerate(series.items()):
            rectangles = []
            for index, height in enumerate(heights):
                if drawable(height, log=False):
                    left = plot.x(index) + step * GAP / 2 + order * width
                    hint = f"{name}\n{x} {categories[index]}: {spelled(height)}"
                    rectangles.append(bar(left, width, height, plot, hint))
            groups.append(group(classes(slots[name]), rectangles))
        slanted = [slant(at, plot.y.start + 16, name) for at, name in zip(centres, categories, strict=True) if aslant]
        return plot.frame(labels) + Markup("").join([*slanted, *groups, zero(plot)])

    peaks = [
        f"{name} is highest, {spelled(max(kept))}, at {categories[heights.index(max(kept))]}"
        for name, heights in series.items()
        if (kept := [height for height in heights if drawable(height, log=False)])
    ]
    return Chart(
        alt=f"Bar chart of {y} by {x}: {'; '.join(peaks) or 'no data'}.",
        draw=draw,
        sizes=(WIDE, NARROW) if shown else (),
        records=[
            {"series": name, x: category, y: height}
            for name, heights in series.items()
            for category, height in zip(categories, heights, strict=True)
        ],
        legend=legend(slots, lines=False) if len(slots) > 1 else Markup(""),
        undrawn=len(values) - len(shown),
    )


def bar(left: float, width: float, value: float, plot: Plot, hint: str) -> Markup:
    top, bottom = sorted((plot.y(value), plot.y(0.0)))
    return Markup(
        '<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
    ).format(left, top, max(width - 0.5, 0.5), bottom - top, hint)


def slant(x: float, y: float, name: str) -> Markup:
    """A label that ends at (x, y) and rises to it."""
    turn = Markup('<text transform="translate({:.1f} {:.1f}) rotate(-37)" text-anchor="end">{}</text>')
    return turn.format(x + 4, y, name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")


def zero(plot: Plot) -> Markup:
    """The line that the bars stand on."""
    return Markup('<path class="axis" d="M{:.1f} {:.1f}H{:.1f}"/>').format(plot.x.start, plot.y(0.0), plot.x.end)
