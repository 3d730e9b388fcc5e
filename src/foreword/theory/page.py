"""The page of an experiment: its curves, its slopes beside the theory's, and every count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..report import Report
from .plots import ERRORS

Row = dict[str, Any]


def write_page(result: Row, folder: Path) -> Path:
    """Write `report.html` of the result of `rates`, `profile` or `gates` into `folder`."""
    experiment = result["experiment"]
    fill, title = PAGES[experiment]
    report = Report(title, f"foreword theory {experiment}")
    report.facts(
        {"time of all cells": f"{result['seconds_of_cells'] / 60:,.1f} min", "seed": result["arguments"]["seed"]}
    )
    fill(report, result)
    if result["failed_cells"]:
        report.text(result["failed_cells"])
    return report.write(folder / "report.html")


def _rates(report: Report, result: Row) -> None:
    report.text(
        "Median errors of the least-squares estimate over the sample size n, with their quartiles. Dashes: the "
        "exponent that the theory gives."
    )
    for setting in result["arguments"]["settings"]:
        for surplus in result["arguments"]["over_specified"]:
            here = [row for row in result["table"] if (row["setting"], row["surplus"]) == (setting, surplus)]
            slopes = [row for row in result["slopes"] if (row["setting"], row["surplus"]) == (setting, surplus)]
            series: dict[str, list[tuple[Any, ...]]] = {}
            for slope in slopes:
                error = slope["error"]
                points = [(row["n"], row[error], *row[f"{error}_quartiles"]) for row in here if row[error] is not None]
                series[ERRORS[error]] = points
                if points and slope["theory"] is not None:
                    series[f"n^{slope['theory']:g}, {ERRORS[error]}"] = _power(points, slope["theory"])
            dashed = [name for name in series if name.startswith("n^")]
            title = f"{setting}, {'as many prompts as true' if surplus == 0 else f'{surplus} too many'}"
            report.lines(title, series, x="n", y="median error", log="xy", dashed=dashed)
    report.table("Slopes of log error over log n", [_slope(row) for row in result["slopes"]])
    report.table("Every sample size", [_without_quartiles(row) for row in result["table"]])


def _profile(report: Report, result: Row) -> None:
    report.text(
        "One true prompt is replaced by two halves a distance Δ apart and everything else adapts. R(Δ) is what the "
        "best such function costs without noise; the width is the largest Δ that data of size n can't exclude."
    )
    risks = {
        f"{row['setting']}, {row['split']}": zip(row["deltas"], row["risk"], strict=True) for row in result["risk"]
    }
    floored = {name: [(delta, max(risk, 1e-34)) for delta, risk in points] for name, points in risks.items()}
    report.lines("Profile risk", floored, x="Δ", y="R(Δ)", log="xy")
    widths: dict[str, list[tuple[Any, Any]]] = {}
    for row in result["width"]:
        widths.setdefault(f"{row['setting']}, {row['split']}", []).append((row["n"], row["width"]))
    report.lines("Width of the indistinguishable set", widths, x="n", y="Δ", log="xy")
    report.table("Exponents of the risk", [_flat(row, ("deltas", "risk")) for row in result["risk"]])
    report.table("Widths", [_without_quartiles(row) for row in result["width"]])
    report.table("Slopes of log width over log n", [_flat(row) for row in result["slopes"]])


def _gates(report: Report, result: Row) -> None:
    for setting in dict.fromkeys(row["setting"] for row in result["strength"]):
        series: dict[str, list[tuple[Any, Any]]] = {}
        for row in result["strength"]:
            if row["setting"] == setting:
                for error in ("prompts", "gate"):
                    series.setdefault(f"{error}, gate {row['gate_strength']:g}", []).append((row["n"], row[error]))
        report.lines(f"Errors by the strength of the true gate, {setting}", series, x="n", y="median error", log="xy")
    wrong = {
        row["setting"]: [(gate, max(risk, 1e-34)) for gate, risk in zip(row["gates"], row["risk"], strict=True)]
        for row in result["confounding"]
    }
    report.lines("Risk of holding a wrong gate, without noise", wrong, x="held gate", y="risk", log="y")
    report.table("Random starts that reach the optimum", [_flat(row) for row in result["opening"]])
    report.table("Errors", [_without_quartiles(row) for row in result["strength"]])
    report.table("Slopes", [_flat(row) for row in result["slopes"]])


PAGES: dict[str, tuple[Callable[[Report, Row], None], str]] = {
    "rates": (_rates, "Estimation rates"),
    "profile": (_profile, "What data can't tell apart"),
    "gates": (_gates, "Gates"),
}


def _power(points: Sequence[tuple[Any, ...]], exponent: float) -> list[tuple[float, float]]:
    """The power law through the last point."""
    last_n, last = points[-1][:2]
    return [(n, last * (n / last_n) ** exponent) for n in (points[0][0], last_n)]


def _slope(row: Row) -> Row:
    shown = {"setting": row["setting"], "surplus": row["surplus"], "error": ERRORS[row["error"]]}
    for name, over in (("all n", row["all"]), ("n ≥ 1000", row["tail"])):
        shown[name] = None if over["slope"] is None else (over["slope"], over["low"], over["high"])
    return shown | {"theory": row["theory"]}


def _without_quartiles(row: Row) -> Row:
    return _flat({name: value for name, value in row.items() if not name.endswith("_quartiles")})


def _flat(row: Row, left_out: Sequence[str] = ()) -> Row:
    """The row with nested mappings spread out, and lists of numbers left out."""
    flat: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name} {inner}": one for inner, one in value.items() if not isinstance(one, list)}
        elif name not in left_out and not isinstance(value, list):
            flat[name] = value
    return flat
