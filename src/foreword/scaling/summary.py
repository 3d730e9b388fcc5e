"""The tables and reports of `foreword scaling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..report import Report
from .cost import A100, GIB, Cost, Shape, Workload, cost
from .law import BILLION, Bootstrap, HeldOut, Law, bootstrap, fit, held_out
from .measure import Measured, measure_streams, measure_wider
from .rows import Row

WHEN = (
    "Figures such as 22 times less memory and 6 times less latency hold at batch 1 with short text only: in large "
    "batches or behind long prompts, P streams are slower than the wider model of equal loss."
)
CURVE_POINTS = 40

# ---------------------------------------------------------------------------------------------------------------------
# The law


def fit_summary(rows: Sequence[Row], resamples: int, seed: int) -> dict[str, Any]:
    """Constants with intervals, quality of the fit, hold-out checks, and what streams are worth; ready for JSON."""
    fitted = fit(rows)
    intervals = bootstrap(rows, fitted.law, resamples, seed) if resamples else None
    streams = sorted({row.streams for row in rows})
    return {
        "rows": len(rows),
        "constants": _constants(fitted.law, intervals),
        "R2": fitted.r2,
        "largest error": fitted.largest_error,
        "worth": {str(p): fitted.law.multiplier(p) for p in streams},
        "held out": [_check(check) for check in held_out(rows)] if len(streams) > 2 else [],
    }


def _constants(law: Law, intervals: Bootstrap | None) -> list[dict[str, Any]]:
    units = {"E": 1.0, "A": BILLION, "alpha": 1.0, "k": 1.0}
    names = {"E": "E", "A": "A (billions)", "alpha": "α", "k": "k"}
    constants = []
    for name, unit in units.items():
        row: dict[str, Any] = {"constant": names[name], "value": getattr(law, name) / unit}
        if intervals is not None:
            low, high = getattr(intervals, name)
            row |= {"low (95 %)": low / unit, "high (95 %)": high / unit}
        constants.append(row)
    return constants


def _check(check: HeldOut) -> dict[str, Any]:
    return {"left out": check.what, "bias": check.bias, "largest error": check.largest_error, "k": check.law.k}


def fit_report(corpora: Mapping[str, Sequence[Row]], summaries: Mapping[str, dict[str, Any]]) -> Report:
    """A page with each corpus' curves, constants and checks."""
    report = Report("The parallel scaling law", "L(N, P) = E + (A / (N · (1 + k ln P)))^α")
    for name, rows in corpora.items():
        summary = summaries[name]
        law = fit(rows).law
        report.section(name)
        report.lines("Loss", _curves(rows, law), x="parameters (billions)", y="loss", log="x", dashed=_fits(rows))
        report.table("Constants", summary["constants"])
        report.table(
            "P streams are worth", [{"P": int(p), "times the parameters": w} for p, w in summary["worth"].items()]
        )
        if summary["held out"]:
            report.table("Predicting rows that were left out of the fit", summary["held out"])
    return report


def _fits(rows: Sequence[Row]) -> list[str]:
    return [f"P = {p}, fitted" for p in sorted({row.streams for row in rows})]


def _curves(rows: Sequence[Row], law: Law) -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for p in sorted({row.streams for row in rows}):
        observed = sorted((row.parameters / BILLION, row.loss) for row in rows if row.streams == p)
        low, high = observed[0][0], observed[-1][0]
        sizes = [low * (high / low) ** (i / CURVE_POINTS) for i in range(CURVE_POINTS + 1)]
        curves[f"P = {p}"] = observed
        curves[f"P = {p}, fitted"] = [(n, law.loss(n * BILLION, p)) for n in sizes]
    return curves


# ---------------------------------------------------------------------------------------------------------------------
# The cost


def cost_rows(
    shape: Shape, streams: Sequence[int], factors: Mapping[int, float], work: Workload
) -> list[dict[str, Any]]:
    """By the paper's accounting: P streams, and beside each the model with factors[P] times the parameters."""
    base = cost(shape, 1, work)
    rows = [_line("P = 1", base, base)]
    for p in streams:
        if p > 1:
            rows.append(_line(f"P = {p}", cost(shape, p, work), base))
            rows.append(_line(f"{factors[p]:.2f} × parameters", cost(shape.wider(factors[p]), 1, work), base))
    return rows


def prefill_rows(shape: Shape, streams: Sequence[int], work: Workload) -> list[dict[str, Any]]:
    """What computing no queries for prefix tokens saves of a prefill."""
    rows = []
    for p in streams:
        if p > 1:
            padded, ours = (cost(shape, p, work, padded=padded) for padded in (True, False))
            rows.append(
                {
                    "streams": f"P = {p}",
                    "queries a row, padded": work.prompt + work.length,
                    "queries a row, ours": work.prompt,
                    "prefill s, padded": padded.prefill,
                    "prefill s, ours": ours.prefill,
                }
            )
    return rows


def measured_rows(
    config: Any, streams: Sequence[int], factors: Mapping[int, float], rounds: int, work: Workload
) -> list[dict[str, Any]]:
    """The same on this machine, with random weights: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    ours = measure_streams(config, streams, work, rounds, dtype)
    theirs = measure_wider(config, [factors[p] for p in streams if p > 1], work, rounds, dtype)
    rows = [_line("P = 1", ours[1], ours[1])]
    for p in streams:
        if p > 1:
            rows.append(_line(f"P = {p}", ours[p], ours[1]))
            rows.append(_line(f"{factors[p]:.2f} × parameters", theirs[factors[p]], ours[1]))
    return rows


def _line(name: str, one: Cost | Measured, base: Cost | Measured) -> dict[str, Any]:
    return {
        "model": name,
        "memory GiB": one.memory / GIB,
        "more GiB": (one.memory - base.memory) / GIB,
        "prefill s": one.prefill,
        "decode s": one.decode,
        "times as long": one.seconds / base.seconds,
    }


def cost_report(title: str, tables: Mapping[str, list[dict[str, Any]]]) -> Report:
    """A page with the tables of accounting and measurement."""
    report = Report(f"What parallel streams cost: {title}", f"accounting for an {A100.name}")
    for name, rows in tables.items():
        report.table(name, rows)
        if "times as long" in rows[0]:
            points = [{"label": row["model"], "x": row["memory GiB"], "y": row["times as long"]} for row in rows]
            report.scatter(f"{name}: time against memory", points, x="memory (GiB)", y="times as long as P = 1")
    report.text(WHEN)
    return report
