"""Tasks of a study: where their data is, and the parts that a cell trains on and is tested with."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..data import load
from ..data.builtin import restaurants
from ..errors import ForewordError
from ..evaluate.labels import with_labels
from ..evaluate.tasks import RESTAURANT, Task, read_task
from .fields import Fields

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class TaskSpec:
    """Data to train on and to test with.

    Attributes:
        name: in tables.
        train: a data file; None for the built-in task.
        tests: name → data file of each test part; "" for rows held out from `train`, or the built-in task's own.
        train_size, test_size: rows; None for all.
        dev_size: training rows that are held out for learning rates.
        labels: label in the file → label word.
        chat: make messages of plain prompts.
        protocol: of choices and labels (see `foreword.evaluate`).
        digest: of the files' contents, so that a change of them is noticed.
    """

    name: str
    train: str | None
    tests: dict[str, str]
    train_size: int | None
    test_size: int
    dev_size: int
    labels: dict[str, str]
    chat: bool
    protocol: Literal["likelihood", "generation"]
    digest: str


@dataclass(frozen=True)
class Parts:
    """The data of a cell: what it trains on, training rows held out for learning rates, and what it is tested with."""

    train: Dataset
    dev: Dataset
    tests: dict[str, Task]


def read_task_spec(name: str, fields: Fields, folder: Path, holds_out: bool) -> TaskSpec:
    """The task called `name` in a study.

    Args:
        fields: its own, in the study.
        folder: what file names are relative to.
        holds_out: whether the study searches for learning rates, on rows that are held out.

    Raises:
        ForewordError: names the field that is wrong.
    """
    built_in = name == RESTAURANT and "train" not in fields
    train = None if built_in else _file(fields, "train", fields.text("train"), folder)
    tests = {name: ""}
    if "test" in fields:
        wanted = "a file, or a mapping of names to files"
        given = fields.take("test", lambda value: isinstance(value, (str, dict)) and bool(value), wanted)
        listed = given if isinstance(given, dict) else {name: given}
        tests = {str(key): _file(fields, "test", file, folder) for key, file in listed.items()}
    dev_size = fields.count("dev_size", 50)
    spec = TaskSpec(
        name=name,
        train=train,
        tests=tests,
        train_size=fields.count("train_size", 400 if built_in else None),
        test_size=fields.count("test_size", 100),
        dev_size=dev_size if holds_out else 0,
        labels={key: str(word) for key, word in fields.mapping("labels", "labels with a word each", {}).values.items()},
        chat=fields.choice("chat", False, True),
        protocol=fields.choice("protocol", "likelihood", "generation"),
        digest=_digest([file for file in (train, *tests.values()) if file]),
    )
    fields.done()
    return spec


def _file(fields: Fields, field: str, name: Any, folder: Path) -> str:
    path = folder / str(name)
    if not path.is_file():
        raise ForewordError(f"{fields.place(field)}: there is no file {path}")
    return str(path.absolute())


def _digest(paths: list[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:12]


# ---------------------------------------------------------------------------------------------------------------------
# Data


def load_parts(spec: TaskSpec, fraction: float = 1.0, seed: int = 0, *, templated: bool = True) -> Parts:
    """The data of a cell; the built-in task in messages where the model is `templated`, else in plain strings.

    The rows held out for tests and learning rates, conversations with all of their turns, are the same in every cell.
    The training rows of a fraction are the first of an order that `seed` draws: those of 10 % are among those of 30 %,
    and every method gets the same.

    Raises:
        ForewordError: the file has too few rows, or can't be read.
    """
    pool = _pool(spec, templated)
    rows = list(dict.fromkeys(_rows(pool)))  # first those held out for learning rates, then for tests
    held_out = spec.dev_size + (spec.test_size if "" in spec.tests.values() and spec.train else 0)
    if len(rows) <= held_out:
        raise ForewordError(f"task {spec.name}: {spec.train} has {len(rows)} rows, and {held_out} are held out")
    dev, rest = _with_rows(pool, rows[: spec.dev_size]), _with_rows(pool, rows[held_out:])
    rest = rest.select(range(min(spec.train_size or len(rest), len(rest))))
    order = list(range(len(rest)))
    random.Random(seed).shuffle(order)
    train = rest.select(order[: math.ceil(Fraction(str(fraction)) * len(rest))])
    tests = {}
    for name, file in spec.tests.items():
        if file:
            test = read_task(file, chat=spec.chat or None, name=name).limited(spec.test_size)
        elif spec.train is None:
            test = Task(name, "restaurant", [dict(row) for row in restaurants("test", spec.test_size, chat=templated)])
        else:
            test = read_task(spec.train, chat=spec.chat or None, name=name)
            for_test = set(rows[spec.dev_size : held_out])
            test = Task(name, test.kind, [example for example in test.examples if example["row"] in for_test])
        tests[name] = _relabelled(test, spec.labels, pool)
    if spec.labels and "choices" not in pool.column_names:
        raise ForewordError(f"task {spec.name}: {spec.train} has no labels to give words to")
    if spec.labels:
        train, dev = (part.map(lambda row: _with_words(row, spec.labels)) for part in (train, dev))
    return Parts(train, dev, tests)


def _pool(spec: TaskSpec, templated: bool) -> Dataset:
    """The training examples in an order of their own."""
    if spec.train is None:
        return restaurants("train", (spec.train_size or 400) + spec.dev_size, chat=templated)
    return load(spec.train, chat=spec.chat or None).shuffle(seed=0)


def _rows(pool: Dataset) -> list[int]:
    """The row of each example; the turns of a conversation have one."""
    return list(pool["row"]) if "row" in pool.column_names else list(range(len(pool)))


def _with_rows(pool: Dataset, rows: Sequence[int]) -> Dataset:
    """The examples of some rows, in the order of `pool`."""
    chosen = set(rows)
    return pool.select([index for index, row in enumerate(_rows(pool)) if row in chosen])


def _relabelled(test: Task, words: Mapping[str, str], pool: Dataset) -> Task:
    """A test of labels with label words, and with the labels of training that it lacks itself."""
    if test.kind != "labels":
        return test
    labels = {*test.examples[0]["choices"], *(pool[0].get("choices") or [])}
    examples = [_with_words(example, words) for example in with_labels(test.examples, sorted(labels))]
    return Task(test.name, test.kind, examples)


def _with_words(row: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """A row of labels with the words for them, in its choices and its completion."""

    def word(label: str) -> str:
        return label.replace(label.strip(), words.get(label.strip(), label.strip()))

    completion = row["completion"]
    if isinstance(completion, str):
        completion = word(completion)
    else:
        completion = [{**turn, "content": word(turn["content"])} for turn in completion]
    return {**row, "completion": completion, "choices": [word(choice) for choice in row["choices"]]}
