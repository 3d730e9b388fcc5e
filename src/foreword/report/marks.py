"""What the charts are drawn with: words, marks, and the colour and shape that tell one series from another."""

from collections.abc import Collection, Iterable, Mapping

from markupsafe import Markup

CHARACTER = 7.0  # width of a character of a label, in SVG units
PALETTE = 8  # colours in report.css, .s0 to .s7
MARKERS = (  # shapes of a mark around the origin; with the palette they tell 40 series apart
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-5L4.6 3.4h-9.2z",
    "M0-5L5 0L0 5L-5 0z",
    "M0 5L4.6-3.4h-9.2z",
)


def words(x: float, y: float, anchor: str, text: str, css: str = "") -> Markup:
    """A line of text that starts at, ends at, or has its middle at x."""
    style = Markup(' class="{}"').format(css) if css else ""
    return Markup('<text{} x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(style, x, y, anchor, text)


def marker(slot: int, x: float, y: float, hint: str) -> Markup:
    """The mark of the series in `slot` at (x, y), with a tooltip."""
    return Markup('<path class="mark" d="{}" transform="translate({:.1f} {:.1f})"><title>{}</title></path>').format(
        shape(slot), x, y, hint
    )


def shape(slot: int) -> str:
    """The path of the mark of the series in `slot`."""
    return MARKERS[(slot + slot // PALETTE) % len(MARKERS)]


def classes(slot: int, dashed: bool = False) -> str:
    """The style-sheet classes of the series in `slot`: a colour, and dashes for each further round of the palette."""
    return f"s{slot % PALETTE}" + (" again" if slot >= PALETTE else "") + (" dashed" if dashed else "")


def group(css: str, marks: Iterable[Markup]) -> Markup:
    """`marks` under the style-sheet classes `css`."""
    return Markup('<g class="{}">{}</g>').format(css, Markup("").join(marks))


def legend(slots: Mapping[str, int], lines: bool = True, dashed: Collection[str] = (), css: str = "") -> Markup:
    """The names of the series beside their marks, on a line where `lines`; `dashed` series have the line alone."""
    width = 26 if lines else 12
    line = Markup('<path class="line" d="M0 7H{}"/>').format(width) if lines else ""
    items = []
    for name, slot in slots.items():
        mark = Markup('<path class="mark" d="{}" transform="translate({} 7)"/>').format(shape(slot), width // 2)
        swatch = Markup('<svg class="{}" width="{}" height="14" aria-hidden="true">{}{}</svg>')
        drawing = swatch.format(classes(slot, name in dashed), width, line, "" if name in dashed else mark)
        items.append(Markup("<li>{}{}</li>").format(drawing, name))
    return Markup('<ul class="{}">{}</ul>').format(f"legend {css}".strip(), Markup("").join(items))
