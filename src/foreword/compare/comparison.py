"""Run a study: learning rates first, then every cell, then what they say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..base import text_base
from ..cells import Backend, Cell, Outcome, failures, run_cells, stored
from ..errors import ForewordError
from ..files import write_json, write_text
from ..space import own_rate
from .budget import sized
from .cell import as_arguments, run_cell
from .entries import Entry
from .names import file_name
from .page import write_page
from .study import Study
from .summary import rows_of, statements_of, table_of
from .sweep import Rates, best_rates, tried, tries


def compare(
    study: Study,
    output: str | Path,
    *,
    workers: int | None = None,
    threads: int | None = None,
    backend: Backend = "processes",
    resources: Mapping[str, float] | None = None,
    collect: bool = False,
) -> dict[str, Any]:
    """Compute the cells of a study that `output` lacks, and write results.json, cells.json, study.yaml and report.html.

    A run that was killed goes on with the missing cells and ends with the tables of an uninterrupted one. TensorBoard
    shows the runs as they go: `tensorboard --logdir OUTPUT`.

    Args:
        output: the study's folder; every cell has one of its own in `cells`.
        workers, threads, backend, resources: see `foreword.cells.run_cells`; on a machine with an accelerator one
            process by default.
        collect: compute nothing, and make the report of the cells that are there.

    Returns:
        What results.json holds: `table`, `statements`, `learning_rates`, `cost`, `failed`.

    Raises:
        ForewordError: a method can't be sized for the budget, two runs would have one name, or another run works on
            `output`.
    """
    folder = Path(output)
    if workers is None and backend == "processes" and torch.accelerator.is_available():
        workers = 1  # all would share it
    entries = _entries(study)

    def run(cells: list[Cell], description: str, later: Sequence[Cell] = ()) -> list[Outcome]:
        if collect:
            return stored(cells, folder)
        return run_cells(
            cells,
            folder,
            workers=workers,
            threads=threads,
            backend=backend,
            resources=resources,
            description=description,
            later=later,
        )

    attempts = run(tries(study, entries), "learning rates", cells_of(study, entries, {})) if study.sweep else []
    sweep_rows = tried(attempts)
    cells = cells_of(study, entries, best_rates(sweep_rows, study))
    outcomes = run(cells, study.name)
    rows = rows_of(outcomes)
    result = {
        "study": study.name,
        "model": study.model,
        "cells": {"complete": sum(outcome.error is None for outcome in outcomes), "of": len(cells)},
        "cost": {
            "hours": _hours([*attempts, *outcomes]),
            "hours of the learning-rate sweep": _hours(attempts),
        },
        "methods": {entry.name: [method.to_dict() for method in entry.methods] for entry in entries},
        "table": table_of(rows),
        "statements": [statement.to_dict() for statement in statements_of(rows, study)],
        "learning_rates": sweep_rows,
        "failed": failures([*attempts, *outcomes]),
    }
    write_text(folder / "study.yaml", study.source)
    write_json(folder / "results.json", result)
    write_json(folder / "cells.json", rows)
    write_page(result, outcomes, study, folder / "report.html")
    return result


def cells_of(study: Study, entries: Sequence[Entry], rates: Rates) -> list[Cell]:
    """The cells, seed by seed, so that a study that is looked at early has whole comparisons.

    Raises `ForewordError` where two would have one name.
    """
    cells: dict[str, Cell] = {}
    for seed, length, fraction, task, entry in product(
        study.seeds, study.lengths, study.fractions, study.tasks, entries
    ):
        arguments = {
            "model": study.model,
            "dtype": study.dtype,
            "entry": entry.name,
            "methods": [method.to_dict() for method in entry.methods],
            "learning_rate": _rate(entry, task.name, rates),
            "fraction": fraction,
            "seed": seed,
            "training": study.training,
            **as_arguments(task, length),
        }
        name = file_name(task.name, entry.name, f"{fraction:g}", length, f"seed{seed}")
        if not entry.methods:  # nothing is trained: one cell a task
            arguments |= {"fraction": 1.0, "seed": 0, "training": {}, "length": list(study.lengths[0])}
            name = file_name(task.name, entry.name)
        cost = study.cost(task, fraction, length)
        cell = cells.setdefault(name, Cell(name, run_cell, arguments, folder=True, cost=cost))
        if cell.arguments != arguments:
            raise ForewordError(
                f"two runs would share the files {name}: rename a task or a method, or choose fractions and lengths "
                "that differ in their first six digits"
            )
    return list(cells.values())


def _rate(entry: Entry, task: str, rates: Rates) -> float | None:
    if not entry.methods:
        return None
    return entry.learning_rate or rates.get((task, entry.name)) or own_rate(entry.methods)


def _entries(study: Study) -> list[Entry]:
    if study.parameters is None:
        return list(study.entries)
    model, _ = text_base(study.model, dtype=study.dtype)
    return [sized(entry, model, study.parameters) for entry in study.entries]


def _hours(outcomes: Sequence[Outcome]) -> float:
    return round(sum(outcome.seconds for outcome in outcomes) / 3600, 5)
