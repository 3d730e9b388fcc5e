"""One run of a study: train one method on one task from one seed, and test it. What `foreword.cells` calls."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base import text_base
from ..devices import to_fastest
from ..evaluate import Task, evaluate, write_records
from ..model.attach import detach
from ..space import from_dict
from ..train import Training, TrainResult, train
from ..trainer import Diverged
from .budget import steps_within
from .insight import gates, prefix_mass
from .study import Length
from .tasks import Parts, TaskSpec, load_parts

CURVE = 100  # points of a loss curve that are kept
WEIGHED = 8  # test prompts over which attention to the prefix is measured


def run_cell(
    model: str,
    dtype: str,
    entry: str,
    task: dict[str, Any],
    methods: list[dict[str, Any]],
    learning_rate: float | None,
    fraction: float,
    length: list[Any],
    seed: int,
    training: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Train and test. `task` is a `TaskSpec` and `length` a `Length` as JSON has them; no methods: the frozen model.
    `entry` is what tables call the methods.

    The folder keeps the adapter, TensorBoard's logs, and a JSONL file for each test with what the model said.

    Returns:
        `tests`: for each its metric, scores with intervals, and `items`, the metric of every example; and what the run
        was: sizes, steps, seconds, the loss curve, the gates and the attention to the prefix.
    """
    spec = TaskSpec(**task)
    with _quiet(), _logs(folder / "tensorboard"):
        network, tokenizer = text_base(model, dtype=dtype)
        to_fastest(network)
        parts = load_parts(spec, fraction, seed, templated=bool(tokenizer.chat_template))
        outcome: dict[str, Any] = {"trainable": 0, "stored": 0, "steps": 0, "examples": len(parts.train)}
        seconds = 0.0
        if methods:
            settings = _settings(network, tokenizer, methods, parts, Length(*length), training, folder)
            settings = replace(settings, learning_rate=learning_rate, seed=seed)
            result = train(network, tokenizer, [from_dict(one) for one in methods], parts.train, settings)
            outcome |= _described(result, network, tokenizer, parts)
            seconds = result.seconds
        started = time.perf_counter()
        tests = {}
        for name, test in parts.tests.items():
            tested = evaluate(network, tokenizer, test, protocol=spec.protocol)
            write_records(tested, folder / "records")
            tests[name] = tested.to_dict() | {"items": [record[tested.metric] for record in tested.records]}
        spent = {"train": round(seconds, 2), "test": round(time.perf_counter() - started, 2)}
        return {**outcome, "seconds": spent, "tests": tests}


def try_rate(
    model: str,
    dtype: str,
    entry: str,
    task: dict[str, Any],
    methods: list[dict[str, Any]],
    learning_rate: float,
    length: list[Any],
    training: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Train at one rate, and the loss on the training rows that were held out for this; None where it diverged."""
    with _quiet(), _logs(folder / "tensorboard"):
        network, tokenizer = text_base(model, dtype=dtype)
        to_fastest(network)
        parts = load_parts(TaskSpec(**task), templated=bool(tokenizer.chat_template))
        settings = _settings(network, tokenizer, methods, parts, Length(*length), training, folder)
        settings = replace(settings, learning_rate=learning_rate, eval_strategy="epoch")
        if settings.max_steps > 0:
            settings = replace(settings, eval_strategy="steps", eval_steps=settings.max_steps)
        try:
            chosen = [from_dict(one) for one in methods]
            result = train(network, tokenizer, chosen, parts.train, settings, eval_data=parts.dev)
        except Diverged:
            return {"loss": None}
        loss = [line["eval_loss"] for line in result.history if "eval_loss" in line][-1]
        return {"loss": loss if math.isfinite(loss) else None}


def _settings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: list[dict[str, Any]],
    parts: Parts,
    length: Length,
    training: dict[str, Any],
    folder: Path,
) -> Training:
    """How the cell trains: the study's settings and its length; a run that was killed goes on from a checkpoint."""
    own = {"save_strategy": "no", "eval_strategy": "no", **training}
    settings = Training(
        output_dir=str(folder / "adapter"),
        resume_from_checkpoint=True,
        report_to="tensorboard" if find_spec("tensorboard") else "none",
        **own,
    )
    if length.unit == "epochs":
        return replace(settings, num_train_epochs=length.amount)
    if length.unit == "steps":
        return replace(settings, max_steps=int(length.amount))

    def time_steps(count: int) -> float:
        trial = replace(
            settings, output_dir=str(folder / "probe"), max_steps=count, save_strategy="no", report_to="none"
        )
        result = train(model, tokenizer, [from_dict(one) for one in methods], parts.train, trial, name="probe")
        detach(model, "probe")
        return result.seconds

    return replace(settings, max_steps=steps_within(length.amount, time_steps, folder))


def _described(
    result: TrainResult, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, parts: Parts
) -> dict[str, Any]:
    adapter = result.adapter
    losses = [(line["step"], round(line["loss"], 5)) for line in result.history if "loss" in line]
    test: Task = next(iter(parts.tests.values()))
    prompts = [example["prompt"] for example in test.examples[:WEIGHED]]
    return {
        "trainable": adapter.num_trainable,
        "stored": adapter.num_stored,
        "bytes": sum(file.stat().st_size for file in result.output_dir.glob("adapter*")),
        "steps": max((line["step"] for line in result.history), default=0),
        "losses": losses[:: len(losses) // CURVE + 1],
        "gates": _rounded(gates(adapter)),
        "mass": _rounded(prefix_mass(model, tokenizer, prompts)),
    }


def _rounded(heads: dict[str, list[float]]) -> dict[str, list[float]]:
    return {label: [round(value, 4) for value in values] for label, values in heads.items()}


def as_arguments(spec: TaskSpec, length: Length) -> dict[str, Any]:
    """A task and a length as JSON."""
    return {"task": asdict(spec), "length": list(length)}


@contextlib.contextmanager
def _logs(folder: Path) -> Iterator[None]:
    """TensorBoard's files go to `folder`, which is how transformers is told."""
    before = os.environ.get("TENSORBOARD_LOGGING_DIR")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
        if before is not None:
            os.environ["TENSORBOARD_LOGGING_DIR"] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars of training and generation: the study has its own."""
    from ..cli import quiet_libraries

    bars = contextlib.redirect_stderr(io.StringIO()) if sys.stderr.isatty() else contextlib.nullcontext()
    with bars:
        quiet_libraries()
        yield
