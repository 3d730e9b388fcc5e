"""One model, with or without an adapter, on one task."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.builtin import score
from ..errors import ForewordError
from ..files import write_text
from ..generation import Sampling, answer
from .choices import Example, Record, score_choices, summarise_choices
from .generation import score_generation, score_options, summarise_generation
from .intervals import Interval, mean, proportion
from .labels import summarise_labels
from .tasks import METRICS, Kind, Task

Protocol = Literal["likelihood", "generation"]


@dataclass(frozen=True)
class Result:
    """How a model did on a task.

    Attributes:
        task, kind: of the task; an lm-evaluation-harness task is of the kind "lm-eval".
        metric: the score that stands for the task.
        scores: every score with its 95 % interval.
        records: one for each example: what the model said, and its measures.
        seconds: wall time.
    """

    task: str
    kind: str
    metric: str
    scores: dict[str, Interval]
    records: list[Record]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Everything but the records, ready for JSON."""
        return {
            "task": self.task,
            "kind": self.kind,
            "metric": self.metric,
            "examples": len(self.records),
            "scores": {
                name: [number if math.isfinite(number) else None for number in interval]
                for name, interval in self.scores.items()
            },
            "seconds": round(self.seconds, 2),
        }


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    protocol: Protocol = "likelihood",
    sampling: Sampling | None = None,
    batch_size: int = 16,
) -> Result:
    """Score `model`, with the adapter that is active on it, on `task`.

    Args:
        protocol: how choices and labels are scored: by log-likelihood, or by "generation" and the option that the
            answer names (see `foreword.evaluate.generation`).
        sampling: how answers are generated; by default as `default_sampling` says.
        batch_size: rows of a batch in scoring.

    Raises:
        ForewordError: a library of the extra `eval` is missing, or an example can't be scored, as with an adapter that
            has diverged.
    """
    if protocol not in ("likelihood", "generation"):
        raise ForewordError(f"unknown protocol {protocol!r}: likelihood or generation")
    started = time.perf_counter()
    examples = task.examples
    sampling = sampling or default_sampling(task.kind, protocol)
    if task.kind == "restaurant":
        records = score_restaurants(model, tokenizer, examples, sampling)
        scores = {name: mean([record[name] for record in records]) for name in ("facts", "rouge_l")}
        scores["exact_match"] = proportion([record["exact_match"] for record in records])
    elif task.kind == "generation":
        records = score_generation(model, tokenizer, examples, sampling)
        scores = summarise_generation(records)
    elif protocol == "generation":
        records = score_options(model, tokenizer, examples, sampling)
        scores = {"accuracy": proportion([record["accuracy"] for record in records])}
    else:
        records = score_choices(model, tokenizer, examples, batch_size=batch_size)
        scores = summarise_labels(records) if task.kind == "labels" else summarise_choices(records)
    return Result(task.name, task.kind, METRICS[task.kind], scores, records, time.perf_counter() - started)


def default_sampling(kind: Kind, protocol: Protocol = "likelihood") -> Sampling:
    """Greedy answers of up to 128 tokens; of 64 for a restaurant's listing; the ICML protocol's own for options."""
    if kind == "restaurant":
        return Sampling(max_new_tokens=64)
    if kind != "generation" and protocol == "generation":
        return Sampling(temperature=0.1, top_p=0.75, max_new_tokens=512)
    return Sampling()


def score_restaurants(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], sampling: Sampling
) -> list[Record]:
    """The built-in task, listing by listing: `facts` is one listing's slot accuracy (see `foreword.data.builtin`)."""
    answers = answer(model, tokenizer, [example["prompt"] for example in examples], sampling)
    records = []
    for number, (example, text) in enumerate(zip(examples, answers, strict=True), 1):
        measures = score([text], [example])
        records.append(
            {
                "row": number,
                "record": example["record"],
                "prediction": text,
                "facts": measures["slot_accuracy"],
                "exact_match": measures["exact_match"],
                "rouge_l": measures["rouge_l"],
            }
        )
    return records


def write_records(result: Result, folder: str | Path) -> Path:
    """Write the records as JSONL to `folder`/<task>.jsonl."""
    lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) for record in result.records]
    return write_text(Path(folder) / f"{result.task}.jsonl", "\n".join(lines) + "\n")
