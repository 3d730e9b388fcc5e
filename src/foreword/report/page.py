"""The page: blocks of text, charts and tables, written as one HTML file that asks nothing of the network."""

import base64
import hashlib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ..errors import ForewordError
from ..files import write_text
from .bars import bars
from .cells import column, plain
from .heatmap import heatmap
from .lines import lines
from .plot import Chart, Point
from .scatter import Better, scatter

TEMPLATES = Environment(
    loader=PackageLoader(__package__, "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
TEMPLATES.policies["json.dumps_kwargs"] = {"allow_nan": False}
STYLE, SCRIPT = (files(__package__).joinpath("assets", name).read_text("utf-8") for name in ("report.css", "report.js"))


class Report:
    """A page that is built block by block, from the top, and written as one self-contained HTML file.

    Every chart and table offers its data as CSV and JSON. A series has the same colour and mark in every chart of the
    report, given out in the order in which names first appear. Text of any origin is escaped; numbers may be Python's,
    NumPy's or tensors of one item, and None and NaN mean that a value is missing.

        report = Report("Zero-init on TREC", subtitle="SmolLM2-135M, 3 seeds")
        report.lines("Loss", {"zero-init": [(1, 3.2), (2, 2.1)]}, x="step", y="loss")
        report.table("Scores", [{"method": "zero-init", "accuracy": (0.81, 0.79, 0.83), "parameters": 368640}])
        report.write("report.html")
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._blocks: list[Markup] = []
        self._slots: dict[str, int] = {}
        self._level = 2

    def section(self, title: str) -> None:
        """Start a section: a heading above the blocks that follow."""
        self._level = 3
        self._add("section", title=title)

    def text(self, text: str) -> None:
        """Add paragraphs, parted by empty lines; words between backticks are set as code."""
        paragraphs = [
            Markup("").join(
                Markup("<code>{}</code>").format(piece) if index % 2 else escape(piece)
                for index, piece in enumerate(paragraph.split("`"))
            )
            for paragraph in re.split(r"\n\s*\n", text.strip())
        ]
        self._add("text", paragraphs=paragraphs)

    def code(self, text: str) -> None:
        """Add lines of code, for example a command to run next."""
        self._add("code", text=text)

    def facts(self, facts: Mapping[str, object]) -> None:
        """Add key figures, large, beside each other: {"held-out score": "31 → 92 %", "adapter": "368 KB"}."""
        self._add("facts", facts=facts)

    def table(
        self,
        title: str,
        rows: Iterable[Mapping[str, Any]],
        columns: Sequence[str] | None = None,
        formats: Mapping[str, str] | None = None,
        note: str = "",
    ) -> None:
        """Add a table that sorts by a click on a heading, one row per mapping.

        `columns` picks and orders the columns (default: all keys, in the order in which they appear). A value is text,
        a number, or (value, low, high), a number with its interval. `formats` gives a column's format string:
        {"accuracy": "{:.1%}"}. Raises `ForewordError` for a tuple of another length.
        """
        table = [{name: plain(value) for name, value in row.items()} for row in rows]
        names = list(columns) if columns is not None else list(dict.fromkeys(name for row in table for name in row))
        for index, row in enumerate(table, 1):
            for name, value in row.items():
                if isinstance(value, tuple) and len(value) != 3:
                    raise ForewordError(
                        f"table {title!r}, row {index}, {name!r}: a tuple is (value, low, high), not {len(value)} long"
                    )
        cells = [column(name, (row.get(name) for row in table), (formats or {}).get(name)) for name in names]
        records = [spread({name: row.get(name) for name in names}) for row in table]
        self._add("table", title=title, columns=cells, count=len(table), records=records, note=note)

    def samples(self, title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], note: str = "") -> None:
        """Add long texts side by side (below each other on a phone), line breaks kept: inputs, outputs, references."""
        records = [{name: plain(row.get(name)) for name in columns} for row in rows]
        self._add("samples", title=title, columns=columns, records=records, note=note)

    def lines(
        self,
        title: str,
        series: Mapping[str, Iterable[Sequence[Any]]],
        x: str = "x",
        y: str = "y",
        log: str = "",
        dashed: Collection[str] = (),
        note: str = "",
    ) -> None:
        """Add curves: {name: [(x, y) or (x, y, low, high), …]}, the latter with a band from `low` to `high`.

        `x` and `y` name the axes, `log` those that are logarithmic ("x", "y" or "xy"), `dashed` the series drawn as
        dashes without marks (a baseline, a fitted slope). A missing y makes a gap. Long series are thinned in the
        drawing, not in the data. Raises `ForewordError` for a point of another length.
        """
        curves = {name: [self._point(title, name, point) for point in points] for name, points in series.items()}
        self._chart(title, lines(curves, self._slots_of(curves), x, y, log, dashed), note)

    def scatter(
        self,
        title: str,
        points: Iterable[Mapping[str, Any]],
        x: str = "x",
        y: str = "y",
        log: str = "",
        frontier: Better | None = None,
        note: str = "",
    ) -> None:
        """Add points: mappings of "label", "x", "y" and, for an interval in y, "low" and "high".

        `log` is as in `lines`. `frontier` says which y is better, "higher" or "lower", and draws the steps through the
        points that none with a smaller or equal x equals or beats.
        """
        labelled = [
            (str(p["label"]), self._point(title, p["label"], [p["x"], p["y"], p.get("low"), p.get("high")]))
            for p in points
        ]
        slots = self._slots_of(label for label, _ in labelled)
        self._chart(title, scatter(labelled, slots, x, y, log, frontier), note)

    def bars(
        self,
        title: str,
        series: Mapping[str, Iterable[Any]],
        categories: Iterable[object],
        x: str = "x",
        y: str = "y",
        note: str = "",
    ) -> None:
        """Add grouped bars from zero: {name: one value per category}. Raises `ForewordError` on a wrong count."""
        labels = [str(category) for category in categories]
        heights = {name: [number(value) for value in values] for name, values in series.items()}
        for name, values in heights.items():
            if len(values) != len(labels):
                raise ForewordError(
                    f"bars {title!r}, series {name!r}: {len(values)} values for {len(labels)} categories; give one each"
                )
        self._chart(title, bars(heights, labels, self._slots_of(heights), x, y), note)

    def heatmap(
        self,
        title: str,
        matrix: Iterable[Iterable[Any]],
        rows: str = "row",
        columns: str = "column",
        row_labels: Iterable[object] | None = None,
        column_labels: Iterable[object] | None = None,
        limit: float | None = None,
        note: str = "",
    ) -> None:
        """Add `matrix` (rows, columns) as colours; `rows` and `columns` name the axes ("layer", "head").

        Labels default to 0, 1, 2, …. Values of magnitude `limit` (default: the largest) and above get the full colour;
        maps to be compared need the same one, 1.0 for gates. Small maps that follow each other stand side by side.
        Raises `ForewordError` where the rows differ in length or the labels in number.
        """
        values = [[number(value) for value in row] for row in matrix]
        down = [str(label) for label in (range(len(values)) if row_labels is None else row_labels)]
        width = len(values[0]) if values else 0
        across = [str(label) for label in (range(width) if column_labels is None else column_labels)]
        if len(down) != len(values):
            raise ForewordError(f"heat map {title!r}: {len(down)} row labels for {len(values)} rows; give one each")
        for label, row in zip(down, values, strict=True):
            if len(row) != len(across):
                raise ForewordError(
                    f"heat map {title!r}, {rows} {label}: {len(row)} values for {len(across)} columns; give one each"
                )
        self._chart(title, heatmap(values, down, across, rows, columns, limit), note)

    def html(self) -> str:
        """The page as text."""
        digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
        page = TEMPLATES.get_template("page.html").render(
            title=self.title,
            subtitle=self.subtitle,
            blocks=self._blocks,
            style=Markup(STYLE),
            script=Markup(SCRIPT),
            script_hash=f"sha256-{digest}",
        )
        return page.encode("utf-8", "replace").decode("utf-8")  # lone surrogates of a model's output become "?"

    def write(self, path: str | Path) -> Path:
        """Write the page to `path` atomically and return the path. Raises `ForewordError` where that fails."""
        return write_text(path, self.html())

    def _add(self, macro: str, **values: Any) -> None:
        blocks = TEMPLATES.get_template("blocks.html").module
        number = len(self._blocks) + 1
        self._blocks.append(getattr(blocks, macro)(id=f"b{number}", level=self._level, **values))

    def _chart(self, title: str, chart: Chart, note: str) -> None:
        names = ("wide", "narrow") if len(chart.sizes) == 2 else ("",)
        drawings = [(name, size, chart.draw(size)) for name, size in zip(names, chart.sizes, strict=False)]
        records = [{name: plain(value) for name, value in record.items()} for record in chart.records]
        self._add("chart", title=title, chart=chart, drawings=drawings, records=records, note=note)

    def _slots_of(self, names: Iterable[str]) -> dict[str, int]:
        """The colour and mark of each name, new ones for names that the report hasn't had yet."""
        return {name: self._slots.setdefault(name, len(self._slots)) for name in names}

    @staticmethod
    def _point(title: str, name: str, point: Sequence[Any]) -> Point:
        if len(point) not in (2, 4):
            raise ForewordError(
                f"chart {title!r}, series {name!r}: a point is (x, y) or (x, y, low, high), not {len(point)} long"
            )
        return Point(*map(number, point), *[math.nan] * (4 - len(point)))


def spread(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with each (value, low, high) as three fields, as a CSV file wants it."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, tuple):
            flat |= {name: value[0], f"{name} low": value[1], f"{name} high": value[2]}
        else:
            flat[name] = value
    return flat


def number(value: Any) -> float:
    """`value` as a float, NaN for None."""
    return math.nan if value is None else float(value)
