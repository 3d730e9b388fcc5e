"""The report of a study: accuracy against parameters, time and data; losses; gates; attention to the prefix; tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..cells import Outcome
from ..report import Report
from .study import Length, Study
from .summary import Row, place

MAPS = 12  # heat maps that a report shows at most


def write_page(result: dict[str, Any], outcomes: Sequence[Outcome], study: Study, path: Path) -> Path:
    """Write report.html: `result` is what results.json holds, `outcomes` are the cells' own."""
    report = Report(f"Comparison: {study.name}", _subtitle(study))
    cells, cost = result["cells"], result["cost"]
    report.facts(
        {
            "methods": len(study.entries),
            "tests": sum(len(task.tests) for task in study.tasks),
            "seeds": len(study.seeds),
            "runs": f"{cells['complete']} of {cells['of']}",
            "machine time": f"{cost['hours']:.2f} h",
        }
    )
    done = [outcome for outcome in outcomes if outcome.error is None]
    table = result["table"]
    if table:
        _scores(report, table, result["statements"], study)
        _data_curves(report, table, study)
        _losses(report, done, study)
        _insides(report, done)
    _protocol(report, result, study)
    return report.write(path)


def _subtitle(study: Study) -> str:
    budget = (
        "each method at its own size" if study.parameters is None else f"up to {study.parameters:,} parameters each"
    )
    lengths = " and ".join(length.words for length in study.lengths)
    return f"{study.model}, {budget}, {lengths} of training, {len(study.seeds)} seeds"


def _scores(report: Report, table: list[Row], found: list[dict[str, Any]], study: Study) -> None:
    report.section("Which method")
    interval = "Intervals are 95 %, over seeds and test examples."
    for where, rows in _by_place(table, study):
        metric = rows[0]["metric"]
        for measure, axis in (("trainable", "trainable parameters"), ("train_seconds", "seconds of training")):
            points = [_point(row, measure) for row in rows if row[measure] > 0]
            report.scatter(
                f"{where}: {metric} against {axis}", points, axis, metric, log="x", frontier="higher", note=interval
            )
    report.table(
        "Scores",
        [
            {
                "test": place(row, study),
                "method": row["method"],
                "score": tuple(row["score"]),
                "metric": row["metric"],
                "seeds": row["seeds"],
                "trained": row["trainable"],
                "stored": row["stored"],
                "bytes": row["bytes"],
                "learning rate": row["learning_rate"],
                "steps": row["steps"],
                "training s": row["train_seconds"],
                "testing s": row["test_seconds"],
            }
            for row in table
        ],
        note=interval,
    )
    if found:
        report.table(
            "What can be said",
            [
                {
                    "statement": one["sentence"],
                    "difference": (one["difference"], one["low"], one["high"]),
                    "p": one["p"],
                    "p (Holm)": one["p_holm"],
                    "seeds": one["seeds"],
                    "examples": one["items"],
                }
                for one in found
            ],
            note="Paired t-tests over seeds and test examples. p (Holm) is adjusted for all pairs of this table.",
        )


def _data_curves(report: Report, table: list[Row], study: Study) -> None:
    """Score against the share of the training data."""
    if len(study.fractions) < 2:
        return
    report.section("How much data")
    for length in study.lengths:
        words = length.words
        note = f"{words} at every share." if length.unit != "epochs" else f"{words}: fewer steps at a smaller share."
        for test in dict.fromkeys(row["test"] for row in table):
            rows = [row for row in table if row["test"] == test and row["length"] == str(length) and row["steps"] > 0]
            curves: dict[str, list[tuple[float, ...]]] = {}
            for row in rows:
                curves.setdefault(row["method"], []).append((100 * row["fraction"], *row["score"]))
            if rows:
                axis = "% of the training data"
                report.lines(f"{test}: {words}", curves, axis, rows[0]["metric"], log="x", note=note)


def _losses(report: Report, outcomes: Sequence[Outcome], study: Study) -> None:
    """The training loss of each method, the mean over seeds, where all of the data is used."""
    report.section("Training")
    groups: dict[str, dict[str, dict[int, list[float]]]] = {}
    for outcome in outcomes:
        arguments = outcome.cell.arguments
        if not arguments["methods"] or arguments["fraction"] < max(study.fractions):
            continue
        title = f"{arguments['task']['name']}: loss"
        if len(study.lengths) > 1:
            title += f", {Length(*arguments['length']).words}"
        steps = groups.setdefault(title, {}).setdefault(arguments["entry"], {})
        for step, loss in outcome.result["losses"]:
            steps.setdefault(step, []).append(loss)
    for title, methods in groups.items():
        curves = {
            name: [(step, statistics.mean(losses)) for step, losses in sorted(steps.items())]
            for name, steps in methods.items()
        }
        report.lines(title, curves, "step", "nats a token", note="The mean over seeds.")


def _insides(report: Report, outcomes: Sequence[Outcome]) -> None:
    """Gates by layer and head, and attention to the prefix by layer, of the first seed at all of the data."""
    first: dict[tuple[str, str], Any] = {}
    for outcome in sorted(outcomes, key=lambda one: (-one.cell.arguments["fraction"], one.cell.arguments["seed"])):
        if outcome.cell.arguments["methods"]:
            key = (outcome.cell.arguments["task"]["name"], outcome.cell.arguments["entry"])
            first.setdefault(key, outcome.result)
    gated = [(key, result["gates"]) for key, result in first.items() if result["gates"]]
    if gated:
        report.section("How far the gates are open")
    limit = max((abs(value) for _, sites in gated for heads in sites.values() for value in heads), default=1.0)
    for (task, method), sites in gated[:MAPS]:
        labels = list(sites)
        report.heatmap(
            f"{method} on {task}: tanh(gate)", list(sites.values()), "layer", "head", labels, limit=limit or 1.0
        )
    masses: dict[str, dict[str, dict[str, float]]] = {}
    for (task, method), result in first.items():
        if result["mass"]:
            masses.setdefault(task, {})[method] = {
                label: statistics.mean(heads) for label, heads in result["mass"].items()
            }
    if masses:
        report.section("Where attention goes to the prefix")
    note = (
        "λ, the prefix's share of the softmax it is in: the mean over heads and over the tokens of eight test prompts."
    )
    for task, methods in masses.items():
        curves = {
            name: [(int(_layer(label)), share) for label, share in sites.items()] for name, sites in methods.items()
        }
        report.lines(f"{task}: share of attention", curves, "layer", "λ", note=note)


def _layer(label: str) -> str:
    """The layer's number in a site's label."""
    return label.rsplit(".", 1)[-1]


def _protocol(report: Report, result: dict[str, Any], study: Study) -> None:
    report.section("How it was measured")
    if result["failed"]:
        report.text(f"Not everything was: {result['failed']}.")
    if result["learning_rates"]:
        hours = result["cost"]["hours of the learning-rate sweep"]
        note = (
            f"{hours:.2f} h of the machine time. The rate of the lowest loss on held-out training rows is used; no "
            "test row is looked at."
        )
        report.table("The search for learning rates", result["learning_rates"], note=note)
    methods = [{"method": name, "configuration": json.dumps(parts)} for name, parts in result["methods"].items()]
    report.table("Methods as they were run", methods)
    report.code(study.source)


def _by_place(table: list[Row], study: Study) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each test, at all of the data; those of several lengths apart."""
    groups: dict[str, list[Row]] = {}
    for row in table:
        if row["fraction"] == max(study.fractions):
            groups.setdefault(place(row, study), []).append(row)
    yield from groups.items()


def _point(row: Row, measure: str) -> dict[str, Any]:
    value, low, high = row["score"]
    return {"label": row["method"], "x": row[measure], "y": value, "low": low, "high": high}
