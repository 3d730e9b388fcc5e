"""lm-evaluation-harness on a live model: its tasks by name, by a YAML file, or by name with local documents."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ForewordError
from ..model.host import host_on
from .evaluation import Result
from .intervals import Z95, Interval
from .tasks import require_distinct


def run_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    chat: bool = False,
) -> list[Result]:
    """Run tasks of lm-evaluation-harness on `model` as it is, with the adapter that is active on it.

    Args:
        tasks: each a task's or group's name ("arc_easy", "mmlu"), which downloads its documents; the path of a task's
            YAML file; or "name@documents.jsonl", the task of that name with its documents from a local file.
        num_fewshot: examples in the prompt; the task's own number by default.
        limit: documents of each task.
        batch_size: rows of a batch.
        chat: put prompts through the tokenizer's chat template.

    Returns:
        One result for each task and group, in the harness's order; intervals are ±1.96 of its standard errors, and
        NaN where it gives none.

    Raises:
        ForewordError: lm-eval is not installed, has no such task, or can't load its documents; two tasks have one name;
            the adapter's gates read the prompt (unipelt); or a document's score is not finite.
    """
    require_distinct([task_name(task) for task in tasks])
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ForewordError("these tasks are lm-evaluation-harness's: pip install 'foreword[eval]'") from error
    _require_no_prompt_gates(model)
    started = time.perf_counter()
    by_name = any(not _is_yaml(task) for task in tasks)
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        manager = TaskManager(include_defaults=by_name)
        specs = [_spec(task, manager, Path(folder)) for task in tasks]
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        try:
            found = simple_evaluate(
                model=wrapped,
                tasks=specs,
                num_fewshot=num_fewshot,
                limit=limit,
                task_manager=manager,
                apply_chat_template=chat,
                bootstrap_iters=1000,  # for the few metrics that are no means
            )
        except (OSError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ForewordError(f"lm-eval can't run {', '.join(tasks)}: {reason}") from error
    assert found is not None  # None on the other ranks of a distributed run only
    seconds = (time.perf_counter() - started) / len(found["results"])
    return [_result(name, scores, found["samples"].get(name, []), seconds) for name, scores in found["results"].items()]


def task_name(task: str) -> str:
    """What results call a task; for a YAML file, which says it inside, its path."""
    return task if _is_yaml(task) else task.partition("@")[0]


def _require_no_prompt_gates(model: PreTrainedModel) -> None:
    """Raise `ForewordError` for an adapter whose gates see the prompt alone: the harness doesn't say where it ends."""
    host = host_on(model)
    active = None if host is None or host.active is None else host.adapters[host.active]
    for part in [] if active is None else active.parts:
        if part.reads_prompt:
            raise ForewordError(
                f"{part.method.name} computes its gates from the prompt, which lm-eval hands over together with the "
                "answer; score a file of your own: --tasks questions.jsonl"
            )


def _is_yaml(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _spec(task: str, manager: Any, folder: Path) -> str:
    """What the harness takes for `task`: a name, or the path of a YAML file."""
    if _is_yaml(task):
        if not Path(task).is_file():
            raise ForewordError(f"{task} does not exist")
        return task
    name, at, documents = task.partition("@")
    if name not in manager.task_index:
        raise ForewordError(f"lm-eval has no task {name!r}; `lm_eval ls tasks` lists them")
    if not at:
        return name
    if not Path(documents).is_file():
        raise ForewordError(f"{task}: there is no file {documents}")
    config = {
        "include": str(manager.task_index[name].yaml_path),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(Path(documents).absolute())}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return str(path)


def _result(name: str, scores: dict[str, Any], samples: list[dict[str, Any]], seconds: float) -> Result:
    intervals = {}
    for key, value in scores.items():
        metric, _, variant = key.partition(",")
        if not variant or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = scores.get(f"{metric}_stderr,{variant}")
        reach = Z95 * error if isinstance(error, float) else math.nan
        label = metric if variant == "none" else f"{metric} ({variant})"
        intervals[label] = Interval(float(value), float(value) - reach, float(value) + reach)
    if not intervals:
        raise ForewordError(f"lm-eval gave no number for {name}")
    records = [_record(sample) for sample in samples]
    for record in records:
        numbers = [value for value in (*record["responses"], *record.values()) if isinstance(value, float)]
        if not all(map(math.isfinite, numbers)):
            raise ForewordError(f"{name}: a score of document {record['row']} is not finite; has the adapter diverged?")
    return Result(name, "lm-eval", next(iter(intervals)), intervals, records, seconds)


def _record(sample: dict[str, Any]) -> dict[str, Any]:
    """The row, the right answer, what the model said (log-likelihoods or texts), and each metric of it."""
    measures = {name: sample[name] for name in sample["metrics"] if isinstance(sample.get(name), (int, float))}
    said = [response[0] if isinstance(response, (list, tuple)) else response for response in sample["filtered_resps"]]
    return {"row": sample["doc_id"] + 1, "answer": sample["target"], "responses": said, **measures}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's log and prints, and without its bars where stderr is no terminal."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    bars = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with bars, contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
