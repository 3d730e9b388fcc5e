"""Figures of the theory experiments, drawn with matplotlib (the extra "report") as NAME.svg and NAME.png."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ForewordError

STYLE: Any = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "foreword",
    "savefig.bbox": "tight",
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8a8a")  # Okabe and Ito
REFERENCE = {"color": "#555555", "linestyle": (0, (4, 3)), "linewidth": 0.9, "zorder": 1}
ERRORS = {
    "f": "function, L2",
    "gate": "gate",
    "matched": "prompts",
    "single": "prompts hit once",
    "doubled": "prompts hit twice",
    "D": "Voronoi loss",
}


def require() -> None:
    """Raise `ForewordError` where matplotlib is not installed, before a long run rather than after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ForewordError("plots need matplotlib: pip install 'foreword[report]', or pass plot=False") from error


@contextmanager
def _figure(path: Path, rows: int, columns: int, width: float, height: float) -> Iterator[Any]:
    """A grid of axes with room for a legend below each, saved as SVG and PNG when the block ends."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure.subplots(rows, columns, squeeze=False, gridspec_kw={"hspace": 0.7, "wspace": 0.28})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=110)


def _known(x: Sequence[float], y: Sequence[float | None]) -> tuple[list[float], list[float]]:
    pairs = [(at, value) for at, value in zip(x, y, strict=True) if value is not None]
    return [at for at, _ in pairs], [value for _, value in pairs]


def _finish(axes: Any, columns: int = 1, **labels: Any) -> None:
    """Labels and scales, the legend below the box, and no labels between the decades of a logarithmic axis."""
    from matplotlib.ticker import NullFormatter

    axes.set(**labels)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_minor_formatter(NullFormatter())
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=columns)


def _power(axes: Any, x: Sequence[float], last: float, exponent: float) -> None:
    """The power law through (x[-1], last), dashed."""
    axes.plot([x[0], x[-1]], [last * (x[0] / x[-1]) ** exponent, last], **REFERENCE)


def draw_rates(result: dict[str, Any], folder: Path) -> None:
    """Median errors over n with their quartiles, a panel for each setting and number of surplus prompts."""
    settings = result["arguments"]["settings"]
    surplus = result["arguments"]["over_specified"]
    with _figure(folder / "rates", len(surplus), len(settings), 3.5 * len(settings), 4.4 * len(surplus)) as grid:
        for row, extra in enumerate(surplus):
            for axes, setting in zip(grid[row], settings, strict=True):
                table = [line for line in result["table"] if (line["setting"], line["surplus"]) == (setting, extra)]
                for slope in result["slopes"]:
                    if (slope["setting"], slope["surplus"]) == (setting, extra):
                        _draw_error(axes, table, slope)
                title = f"{setting}, as many prompts as true" if extra == 0 else f"{setting}, {extra} too many"
                _finish(axes, xscale="log", yscale="log", xlabel="n", title=title)
            grid[row, 0].set_ylabel("median error, quartiles")


def _draw_error(axes: Any, table: Sequence[dict[str, Any]], slope: dict[str, Any]) -> None:
    error = slope["error"]
    colour = COLOURS[list(ERRORS).index(error)]
    n, middle = _known([line["n"] for line in table], [line[error] for line in table])
    if not n:
        return
    label = ERRORS[error]
    if slope["all"]["low"] is not None:
        label += " {slope:.2f} [{low:.2f}, {high:.2f}]".format(**slope["all"])
    axes.plot(n, middle, "o-", markersize=3, color=colour, label=label)
    band = [(line["n"], *line[f"{error}_quartiles"]) for line in table if None not in line[f"{error}_quartiles"]]
    if band:
        axes.fill_between(*zip(*band, strict=True), color=colour, alpha=0.12, linewidth=0)
    if slope["theory"] is not None:
        _power(axes, n, middle[-1], slope["theory"])


def draw_profile(result: dict[str, Any], folder: Path) -> None:
    """The profile risk over the split, and the width of the indistinguishable set over n."""
    with _figure(folder / "profile", 1, 2, 10.0, 5.2) as grid:
        left, right = grid[0]
        for colour, row in zip(COLOURS, result["risk"], strict=False):

            def of(lines: Sequence[dict[str, Any]], case: dict[str, Any] = row) -> list[dict[str, Any]]:
                return [line for line in lines if all(line[name] == case[name] for name in ("setting", "split"))]

            name = f"{row['setting']}, {row['split']}"
            grown = "R = 0" if row["exponent"] is None else f"exponent {row['exponent']:.2f}"
            risks = [max(value, 1e-34) for value in row["risk"]]
            left.plot(row["deltas"], risks, "o-", markersize=3, color=colour, label=f"{name}: {grown}")
            expected, measured = of(result["expected"]), of(result["width"])
            slope = of(result["slopes"])[0]
            label = name if slope["slope"] is None else f"{name}: slope {slope['slope']:.2f}"
            right.plot(*_known(*_columns(expected, "n", "width")), color=colour, label=label)
            right.plot(*_known(*_columns(measured, "n", "width")), "o", color=colour)
            opened = [line["n"] for line in measured if line["width"] is None]
            right.plot(opened, [row["deltas"][-1]] * len(opened), "^", color=colour, fillstyle="none", clip_on=False)
        deltas = result["arguments"]["deltas"]
        _power(left, deltas, 1e-3, 4.0)
        left.text(deltas[0], 1e-2 * (deltas[0] / deltas[-1]) ** 4, "$\\Delta^4$")
        _power(right, [1e3, 1e6], 0.05, -0.25)
        right.text(2e5, 0.05, "$n^{-1/4}$")
        log: Any = {"xscale": "log", "yscale": "log"}
        _finish(left, **log, xlabel="split $\\Delta$", ylabel="profile risk $R(\\Delta)$ without noise")
        _finish(right, **log, xlabel="n", ylabel="width; line: expected, triangle: beyond")


def draw_gates(result: dict[str, Any], folder: Path) -> None:
    """Errors over n for each true gate, the risk of a wrong gate, and how often a search reaches the optimum."""
    settings = list(dict.fromkeys(row["setting"] for row in result["strength"]))
    with _figure(folder / "gates", 2, max(2, len(settings)), 11.0, 9.0) as grid:
        for axes, setting in zip(grid[0], settings, strict=False):
            for colour, gate in zip(COLOURS, result["arguments"]["strengths"], strict=False):
                rows = [r for r in result["strength"] if (r["setting"], r["gate_strength"]) == (setting, gate)]
                for error, line in (("prompts", "o-"), ("gate", "o:")):
                    label = f"{error}, tanh(α*) = {gate:g}"
                    axes.plot(*_columns(rows, "n", error), line, markersize=3, color=colour, label=label)
            _finish(axes, 2, xscale="log", yscale="log", xlabel="n", ylabel="median error", title=setting)
        left, right = grid[1, :2]
        for colour, row in zip(COLOURS, result["confounding"], strict=False):
            risks = [max(value, 1e-34) for value in row["risk"]]
            left.plot(row["gates"], risks, "o-", markersize=3, color=colour, label=row["setting"])
        _finish(left, yscale="log", xlabel="held tanh(α), truth 0.7", ylabel="risk without noise", title="a wrong gate")
        names = [f"{row['setting']} +{row['surplus']}, gate {row['gate']:g}" for row in result["opening"]]
        share = [row["reached"] / row["searches"] for row in result["opening"]]
        right.barh(names[::-1], share[::-1], color=COLOURS[0], height=0.6)
        right.yaxis.tick_right()
        _finish(right, xlim=(0, 1), xlabel="share of searches", title="random prompts that reach the optimum")


def _columns(rows: Sequence[dict[str, Any]], *names: str) -> list[list[Any]]:
    return [[row[name] for row in rows] for name in names]
