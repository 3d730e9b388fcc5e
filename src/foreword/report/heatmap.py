"""A matrix as colours: gates by layer and head, attention mass by layer and prefix row."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from .marks import CHARACTER, words
from .plot import NARROW, WIDE, Chart, Size
from .scales import drawable, spelled

HALF = 384  # width of a map that stands beside the next one, in SVG units
SMALLEST, LARGEST = 11.0, 26.0  # width of a cell in such a map
SHORTEST, TALLEST = 14.0, 20.0  # height of a cell
TOP = 38  # room for the names of the axes and the column labels


def heatmap(
    matrix: list[list[float]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    rows: str,
    columns: str,
    limit: float | None,
) -> Chart:
    """A chart of `matrix` (rows, columns): two hues that meet at zero, and a cross where a value is missing.

    Values of magnitude `limit` and above, by default of the largest magnitude, get the full colour.
    """
    shown = [value for row in matrix for value in row if drawable(value, log=False)]
    limit = limit or max(map(abs, shown), default=0.0) or 1.0
    margin = 10 + CHARACTER * max(map(len, row_labels), default=0)
    count = max(len(column_labels), 1)

    def cell_size(width: int) -> tuple[float, float]:
        across = min((width - margin) / count, LARGEST)
        return across, min(max(across, SHORTEST), TALLEST)

    def paper(width: int) -> Size:
        return Size(width, TOP + 2 + round(cell_size(width)[1] * max(len(matrix), 1)))

    def draw(size: Size) -> Markup:
        across, down = cell_size(size.width)
        parts = [words(0, 12, "start", f"{rows} ↓ {columns} →", "name")]
        ground = Markup('<rect class="zero" x="{:.1f}" y="{}" width="{:.1f}" height="{:.1f}"/>')
        parts.append(ground.format(margin - 1, TOP - 1, across * count + 1, down * len(matrix) + 1))
        longest = max(map(len, column_labels))
        for j in range(0, count, math.ceil((CHARACTER * longest + 6) / across)):
            parts.append(words(margin + (j + 0.5) * across, TOP - 8, "middle", column_labels[j]))
        for i, row in enumerate(matrix):
            parts.append(words(margin - 6, TOP + (i + 0.5) * down + 4, "end", row_labels[i]))
            for j, value in enumerate(row):
                hint = f"{rows} {row_labels[i]}, {columns} {column_labels[j]}: {spelled(value)}"
                box = (margin + j * across, TOP + i * down, across - 1, down - 1)
                parts.append(cell(box, value / limit if drawable(value, log=False) else None, hint))
        return Markup("").join(parts)

    half = margin + SMALLEST * count <= HALF
    sizes = (paper(HALF),) if half else (paper(WIDE.width), paper(NARROW.width))
    span = f"from {spelled(min(shown))} to {spelled(max(shown))}" if shown else "no data"
    return Chart(
        alt=f"Heat map by {rows} and {columns}, {len(matrix)} × {len(column_labels)} values {span}.",
        draw=draw,
        sizes=sizes if shown else (),
        records=[
            {rows: row_label, columns: column_label, "value": value}
            for row_label, row in zip(row_labels, matrix, strict=True)
            for column_label, value in zip(column_labels, row, strict=True)
        ],
        legend=ramp(-limit if min(shown) < 0 else 0.0, limit if max(shown) > 0 else 0.0) if shown else Markup(""),
        undrawn=sum(map(len, matrix)) - len(shown),
        half=half,
    )


def cell(box: tuple[float, float, float, float], share: float | None, hint: str) -> Markup:
    """One value as `share` of the largest magnitude: the hue says the sign, the opacity the size."""
    x, y, width, height = box
    if share is None:
        cross = Markup('<path class="missing" d="M{:.1f} {:.1f}l4 4m0-4l-4 4"><title>{}</title></path>')
        return cross.format(x + width / 2 - 2, y + height / 2 - 2, hint)
    css = "cell negative" if share < 0 else "cell"
    return Markup(
        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill-opacity="{:.2f}">'
        "<title>{}</title></rect>"
    ).format(css, x, y, width, height, min(abs(share), 1.0), hint)


def ramp(low: float, high: float) -> Markup:
    """The colours of the values from `low` <= 0 to `high` >= 0, each end in full colour."""
    colours = ["var(--negative)"] * (low < 0) + ["var(--zero)"] + ["var(--positive)"] * (high > 0)
    bar = Markup('<i style="background:linear-gradient(to right,{})"></i>').format(",".join(colours))
    return Markup('<p class="ramp"><span>{}</span>{}<span>{}</span></p>').format(spelled(low), bar, spelled(high))
