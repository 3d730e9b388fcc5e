"""A small search for each method's learning rate, on training rows held out for it. Its cost is part of the study's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cells import Cell, Outcome
from ..space import own_rate
from .cell import as_arguments, try_rate
from .entries import Entry
from .names import file_name
from .study import Length, Study

Rates = dict[tuple[str, str], float]  # (task, method) → learning rate


def tries(study: Study, entries: Sequence[Entry]) -> list[Cell]:
    """A cell for each task, method and rate: the methods' own times each factor, at all of the data, seed 0."""
    sweep = study.sweep
    if sweep is None:
        return []
    length = study.lengths[0] if sweep.steps is None else Length("steps", sweep.steps)
    return [
        Cell(
            file_name("rate", task.name, entry.name, f"{rate:.2g}"),
            try_rate,
            {
                "model": study.model,
                "dtype": study.dtype,
                "entry": entry.name,
                "methods": [method.to_dict() for method in entry.methods],
                "learning_rate": rate,
                "training": study.training,
                **as_arguments(task, length),
            },
            folder=True,
            cost=study.cost(task, 1.0, length),
        )
        for task in study.tasks
        if sweep.task in (None, task.name)
        for entry in entries
        if entry.methods and entry.learning_rate is None
        for rate in (float(f"{factor * own_rate(entry.methods):.2g}") for factor in sweep.factors)
    ]


def tried(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each try; its loss is None where it diverged or failed."""
    return [
        {
            "task": outcome.cell.arguments["task"]["name"],
            "method": outcome.cell.arguments["entry"],
            "learning_rate": outcome.cell.arguments["learning_rate"],
            "held-out loss": outcome.result["loss"] if outcome.error is None else None,
            "seconds": round(outcome.seconds, 1),
        }
        for outcome in outcomes
    ]


def best_rates(rows: Sequence[dict[str, Any]], study: Study) -> Rates:
    """The rate of the lowest held-out loss for each task and method; none for a method whose tries all diverged."""
    best: dict[tuple[str, str], tuple[float, float]] = {}  # (task, method) → (loss, rate)
    for row in rows:
        if row["held-out loss"] is not None:
            found = (row["held-out loss"], row["learning_rate"])
            key = (row["task"], row["method"])
            best[key] = min(found, best.get(key, found))
    rates = {key: rate for key, (_, rate) in best.items()}
    if study.sweep is not None and study.sweep.task is not None:  # what was found there serves every task
        rates = {(task.name, method): rate for task in study.tasks for (_, method), rate in rates.items()}
    return rates
