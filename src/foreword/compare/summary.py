"""From the cells of a study to its rows: one for each method, test, fraction and length."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..cells import Outcome
from ..evaluate.intervals import crossed_mean
from .statements import FROZEN, Items, Statement, statements
from .study import Length, Study

Row = dict[str, Any]


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each test of each cell that has a result, `items` included."""
    rows = []
    for outcome in outcomes:
        if outcome.error is not None:
            continue
        cell, result = outcome.cell, outcome.result
        for test, tested in result["tests"].items():
            rows.append(
                {
                    **_key(cell.arguments, test),
                    "method": cell.arguments["entry"],
                    "seed": cell.arguments["seed"] if cell.arguments["methods"] else FROZEN,
                    "metric": tested["metric"],
                    "scores": {name: value[0] for name, value in tested["scores"].items()},
                    "items": tested["items"],
                    "learning_rate": cell.arguments["learning_rate"],
                    "steps": result["steps"],
                    "trainable": result["trainable"],
                    "stored": result["stored"],
                    "bytes": result.get("bytes", 0),
                    "train_seconds": result["seconds"]["train"],
                    "test_seconds": result["seconds"]["test"],
                }
            )
    return rows


def table_of(rows: Sequence[Row]) -> list[Row]:
    """The rows joined over seeds: `score` is (mean, low, high), over seeds and test examples."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["test"], row["fraction"], row["length"], row["method"]), []).append(row)
    return [
        {
            **{name: group[0][name] for name in ("task", "test", "fraction", "length", "method", "metric")},
            "score": list(crossed_mean([row["items"] for row in group])),
            "seeds": len(group),
            "trainable": group[0]["trainable"],
            "stored": group[0]["stored"],
            "bytes": group[0]["bytes"],
            "learning_rate": group[0]["learning_rate"],
            "steps": group[0]["steps"],
            "train_seconds": round(statistics.mean(row["train_seconds"] for row in group), 1),
            "test_seconds": round(statistics.mean(row["test_seconds"] for row in group), 1),
        }
        for group in groups.values()
    ]


def statements_of(rows: Sequence[Row], study: Study) -> list[Statement]:
    """What can be said about each pair of methods, on each test, fraction and length."""
    scores: dict[str, dict[str, dict[int, Any]]] = {}
    metrics = {}
    frozen: dict[str, dict[str, Items]] = {}
    for row in rows:
        if row["seed"] == FROZEN:
            frozen.setdefault(row["test"], {})[row["method"]] = {FROZEN: row["items"]}
            continue
        where = place(row, study)
        metrics[where] = row["metric"]
        scores.setdefault(where, {}).setdefault(row["method"], {})[row["seed"]] = row["items"]
    for row in rows:
        if row["seed"] != FROZEN:
            scores[place(row, study)].update(frozen.get(row["test"], {}))  # type: ignore[arg-type]
    return statements(scores, metrics)


def place(row: Row, study: Study) -> str:
    """A test's name, with the fraction and the length where the study has several."""
    words = {str(length): length.words for length in study.lengths}
    several = [row["test"]]
    several += [f"{100 * row['fraction']:g} % of the data"] * (len(study.fractions) > 1)
    several += [words[row["length"]]] * (len(study.lengths) > 1)
    return ", ".join(several)


def _key(arguments: Mapping[str, Any], test: str) -> Row:
    length = str(Length(*arguments["length"]))
    return {"task": arguments["task"]["name"], "test": test, "fraction": arguments["fraction"], "length": length}
