"""Losses of trained models by size and number of streams: the authors' published ones, or a file's."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import ForewordError

COLUMNS = ("parameters", "streams", "loss")
CORPORA = {"stack": "Stack-V2-Python", "pile": "Pile"}


@dataclass(frozen=True)
class Row:
    """One trained model: N non-embedding parameters (those of its streams included), P streams, its final loss."""

    parameters: float
    streams: int
    loss: float


def published(corpus: str) -> list[Row]:
    """The authors' 24 models of a corpus, "stack" or "pile", trained on 42 billion tokens each.

    The figures are those of `parametric_fit.py` in github.com/QwenLM/ParScale (commit cd6acb4), the data behind the
    fit in Chen et al. 2025, Parallel Scaling Law for Language Models (arXiv 2505.10475).
    """
    if corpus not in CORPORA:
        raise ForewordError(f"there are no published losses for {corpus!r}; there are for {', '.join(CORPORA)}")
    name = "published.csv"
    lines = files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines()
    return [_row(line, name, number) for number, line in _table(lines, name) if line["corpus"] == corpus]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a CSV file of parameters, streams and loss. Raises `ForewordError` naming a wrong row."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ForewordError(f"can't read {path}: {error}") from error
    return [_row(line, str(path), number) for number, line in _table(lines, str(path))]


def _table(lines: Iterable[str], where: str) -> list[tuple[int, dict[str, str]]]:
    """(line number, fields by name) of each row."""
    reader = csv.DictReader(lines, skipinitialspace=True)
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ForewordError(f"{where} has no column {missing[0]!r}; it needs {', '.join(COLUMNS)}")
    return [(reader.line_num, line) for line in reader]


def _row(line: dict[str, str], where: str, number: int) -> Row:
    values = {}
    for column in COLUMNS:
        try:
            values[column] = float(line[column])
        except (TypeError, ValueError):
            values[column] = math.nan
        if not 0 < values[column] < math.inf:
            raise ForewordError(f"{where}, line {number}: {column} must be a positive number, not {line[column]!r}")
    if values["streams"] != int(values["streams"]):
        raise ForewordError(f"{where}, line {number}: streams must be a whole number, not {line['streams']!r}")
    return Row(values["parameters"], int(values["streams"]), values["loss"])
