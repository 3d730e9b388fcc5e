"""A study: which methods meet which tasks, with how much data, for how long, from which seeds. Read from YAML.

    model: smollm2
    tasks:
      trec: {train: trec/train.jsonl, test: trec/test.jsonl, train_size: 500, test_size: 200}
      restaurant: {train_size: 400, test_size: 50}      # the built-in task
    methods:
      prefix: {method: prefix-tuning, length: 15}
      lora: {method: lora, r: 3, learning_rate: 0.001}
    fractions: [0.1, 1]
    seeds: 3
    train_for: [{steps: 100}]

docs/comparison.md describes every field.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import ForewordError
from ..train import Training, check_trainer_settings
from .entries import Entry, read_entry
from .fields import Fields, is_count, is_positive, list_of, read_yaml
from .names import file_name
from .tasks import TaskSpec, read_task_spec

READY = ("zero-init", "unified-view", "sample-efficiency", "init", "parscale")  # in the folder `studies`
NAME = r"[\w+-][\w.+ ()=-]*"  # of methods and tasks: they become file names
UNKNOWN = 1000  # rows of a file that is not limited, where an estimate of time needs them
BATCH = Training.per_device_train_batch_size
OWN = ("output_dir", "seed", "learning_rate", "num_train_epochs", "max_steps", "report_to", "resume_from_checkpoint")


class Length(NamedTuple):
    """How long a run trains: a number of optimizer steps, of epochs, or of seconds."""

    unit: Literal["steps", "epochs", "seconds"]
    amount: float

    def __str__(self) -> str:
        return f"{self.unit}{self.amount:g}"

    @property
    def words(self) -> str:
        """ "100 steps"."""
        return f"{self.amount:g} {self.unit}"


@dataclass(frozen=True)
class Sweep:
    """A search for learning rates on held-out training rows.

    Attributes:
        factors: of the method's own rate.
        steps: optimizer steps of a try; as long as the study's first length by default.
        task: the one to search on for all of them; each on its own by default.
    """

    factors: tuple[float, ...]
    steps: int | None = None
    task: str | None = None


@dataclass(frozen=True)
class Study:
    """A checked study. `read_study` makes one."""

    name: str
    model: str
    dtype: str
    tasks: tuple[TaskSpec, ...]
    entries: tuple[Entry, ...]
    fractions: tuple[float, ...]
    seeds: tuple[int, ...]
    lengths: tuple[Length, ...]
    parameters: int | None
    sweep: Sweep | None
    training: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # the YAML, as it was read

    def cost(self, task: TaskSpec, fraction: float, length: Length) -> float:
        """About how many steps a cell trains, so that the time left can be told; seconds count as steps."""
        if length.unit != "epochs":
            return length.amount
        examples = fraction * (task.train_size or UNKNOWN)
        return length.amount * examples / self.training.get("per_device_train_batch_size", BATCH)


def read_study(
    path: str | Path, *, data: str | Path | None = None, model: str | None = None, train: str = "", test: str = ""
) -> Study:
    """The study in a YAML file, or a ready one by its name.

    Args:
        path: the file, or one of `READY`.
        data: the folder that file names in the study are relative to; by default the file's own.
        model: in place of the study's.
        train, test: data files in place of the study's tasks.

    Raises:
        ForewordError: one line that names the file and the field that is wrong.
    """
    ready = str(path) in READY and not Path(path).exists()
    file = Path(str(files(__package__).joinpath("studies", f"{path}.yaml"))) if ready else Path(path)
    if not file.is_file():
        raise ForewordError(f"there is no study {path}; give a YAML file or one of {', '.join(READY)}")
    fields = read_yaml(file)
    folder = Path(data) if data is not None else Path() if ready else file.parent
    if bool(train) != bool(test):
        raise ForewordError("--train and --test go together: one file to learn from, one to be tested with")
    if train:
        fields.values["tasks"] = {
            Path(train).stem: {"train": str(Path(train).absolute()), "test": str(Path(test).absolute())}
        }
    own = fields.text("model", "smollm2")
    tasks, methods = _named(fields, "tasks"), _named(fields, "methods")
    sweep = _sweep(fields)
    study = Study(
        name=fields.text("name", file.stem),
        model=model or own,
        dtype=fields.text("dtype", "auto"),
        tasks=tuple(
            read_task_spec(name, Fields(value or {}, tasks.place(name)), folder, holds_out=sweep is not None)
            for name, value in tasks.values.items()
        ),
        entries=tuple(read_entry(name, value, methods.place(name)) for name, value in methods.values.items()),
        fractions=tuple(fields.take("fractions", list_of(_is_fraction), "a list of numbers above 0 and up to 1", [1])),
        seeds=_seeds(fields),
        lengths=_lengths(fields),
        parameters=_parameters(fields),
        sweep=sweep,
        training=_training(fields),
        source=_instead(model, train, test) + file.read_text(encoding="utf-8"),
    )
    fields.done()
    _require_distinct(study, file)
    return study


def _require_distinct(study: Study, file: Path) -> None:
    """Raise `ForewordError` where two cells would have one file, or two tests one name in the tables."""
    tests = [test for task in study.tasks for test in task.tests]
    for name in tests:
        if tests.count(name) > 1:
            raise ForewordError(f"{file}: two tasks have a test named {name}; tables need a name for each")
    methods, tasks = [entry.name for entry in study.entries], [task.name for task in study.tasks]
    for what, names in {"methods": methods, "tasks": tasks, "tests": tests}.items():
        holders: dict[str, str] = {}  # file name → who has it
        for name in names:
            first = holders.setdefault(file_name(name), name)
            if first != name:
                raise ForewordError(f"{file}: {what} {first!r} and {name!r} would share files; rename one")


def _instead(model: str | None, train: str, test: str) -> str:
    """A comment that names what took the place of the study's own."""
    given = {"model": model, "train": train, "test": test}
    lines = [f"# --{name} {value} in place of what stands below\n" for name, value in given.items() if value]
    return "".join(lines)


def _named(fields: Fields, name: str) -> Fields:
    """A mapping of names, which become names of files."""
    inner = fields.mapping(name, "a mapping of names")
    if not inner.values:
        raise fields.error(name, "a mapping of one name or more")
    for key in inner.values:
        if not re.fullmatch(NAME, key):
            raise ForewordError(f"{inner.place(key)}: a name must be of letters, digits, spaces and . _ + - ( ) =")
    return inner


def _seeds(fields: Fields) -> tuple[int, ...]:
    are_seeds = list_of(lambda value: is_count(value) or (value == 0 and isinstance(value, int)))
    wanted = "a number of seeds, or a list of them"
    value = fields.take("seeds", lambda one: is_count(one) or are_seeds(one), wanted, 3)
    return tuple(value if isinstance(value, list) else range(value))


def _lengths(fields: Fields) -> tuple[Length, ...]:
    wanted = "a list of {steps: n}, {epochs: x} or {seconds: x}, n a positive integer and x a positive number"
    listed = fields.take("train_for", list_of(lambda v: isinstance(v, dict) and len(v) == 1), wanted, [{"epochs": 3}])
    lengths = []
    for one in listed:
        ((unit, amount),) = one.items()
        fits = is_count if unit == "steps" else is_positive
        if unit not in ("steps", "epochs", "seconds") or not fits(amount):
            raise fields.error("train_for", wanted)
        lengths.append(Length(unit, amount if unit == "steps" else float(amount)))
    return tuple(lengths)


def _parameters(fields: Fields) -> int | None:
    inner = fields.mapping("budget", "{parameters: n}", None)
    if inner is None:
        return None
    parameters = inner.count("parameters")
    inner.done()
    return parameters


def _sweep(fields: Fields) -> Sweep | None:
    inner = fields.mapping("learning_rates", "{factors: [...], steps: n}", None)
    if inner is None:
        return None
    factors = inner.take("factors", list_of(is_positive), "a list of positive numbers", [0.3, 1, 3])
    tasks = [*fields.values.get("tasks", {})]
    task = inner.take("task", lambda value: value in tasks, f"one of the tasks {', '.join(map(str, tasks))}", None)
    sweep = Sweep(tuple(float(factor) for factor in factors), inner.count("steps", None), task)
    inner.done()
    return sweep


def _training(fields: Fields) -> dict[str, Any]:
    """Settings of `foreword.train.Training`, but for those that the study itself sets."""
    inner = fields.mapping("training", "settings of training", {})
    defaults = {one.name: one.default for one in dataclasses.fields(Training) if one.name not in OWN}
    for name in inner.values:
        if name in OWN:
            raise ForewordError(f"{inner.place(name)} is set by the study: see methods, seeds and train_for")
        if name == "early_stopping_patience":
            raise ForewordError(f"{inner.place(name)} needs held-out rows, and a study's runs have none: leave it out")
        if name not in defaults:
            raise ForewordError(f"{inner.where} has no field {name!r}; it has {', '.join(sorted(defaults))}")
        kind = type(defaults[name])
        fitting = (int, float) if kind is float else kind
        if kind in (bool, int, float, str) and not isinstance(inner.values[name], fitting):
            raise inner.error(name, f"of type {kind.__name__}")
    check_trainer_settings(inner.values.get("trainer", {}), inner.place("trainer"))
    return inner.values


def _is_fraction(value: Any) -> bool:
    return is_positive(value) and value <= 1
