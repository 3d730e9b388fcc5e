"""foreword eval"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..evaluate import Result

DATA = (".jsonl", ".json", ".csv", ".parquet")


def run(
    tasks: str | None = None,
    model: str | None = None,
    adapter: str | None = None,
    output: str | None = None,
    protocol: Literal["likelihood", "generation"] = "likelihood",
    limit: int | None = None,
    num_fewshot: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    chat: bool = False,
    batch_size: int = 16,
    seed: int = 0,
    speed: bool = False,
    document: str | None = None,
    questions: str | None = None,
    held_out: int = 64,
    dtype: str = "auto",
    json: bool = False,
) -> None:
    """Score a model, with or without an adapter, with confidence intervals; and time it.

    Examples:
        foreword eval --tasks trec/test.jsonl --adapter out/trec
        foreword eval --tasks restaurant,questions.jsonl --adapter out/support --speed
        foreword eval --tasks arc_easy,hellaswag --adapter out/support --limit 200
        foreword eval --tasks arc_easy@arc_easy_test.jsonl,my_task.yaml --model ./base
        foreword eval --document manual.pdf --adapter out/manual --questions questions.jsonl

    A data file (JSONL, JSON, CSV, Parquet) is scored by what it holds: choices and labels by log-likelihood, prompts
    with completions or `references` by exact match, ROUGE and BLEU. Other tasks are lm-evaluation-harness's, by name,
    by a YAML file, or by name with local documents.

    Args:
        tasks: data files and task names, joined by commas; "restaurant" is the built-in one.
        model: a Hub id, a local folder, or "smollm2"; by default the base that the adapter was trained on.
        adapter: an adapter folder or Hub id.
        output: folder for eval.json and one JSONL file a task, with what the model said to each example.
        protocol: how choices and labels of data files are scored; "generation" has the model answer freely and matches
            the option that it names (temperature 0.1, top-p 0.75).
        limit: examples of each task, a seeded draw.
        num_fewshot: examples in the prompts of lm-evaluation-harness.
        max_new_tokens: longest generated answer; 128, or 512 for protocol "generation".
        temperature: of generation; 0 takes the likeliest token.
        chat: put the prompts of lm-evaluation-harness through the chat template.
        batch_size: rows of a batch.
        seed: of the draw of examples and of sampling.
        speed: also measure time to the first token, decoding rate, memory and the adapter's bytes.
        document: a document that the adapter is a cartridge of, or several joined by commas: questions about it are
            answered from nothing, from the cartridge, and from the document in the context.
        questions: a data file of questions with their answers; by default the model writes them.
        held_out: how many questions it writes.
        dtype: of the frozen model: "auto", "float32", "bfloat16", "float16".
        json: print the results as JSON.
    """
    from dataclasses import replace
    from pathlib import Path

    from ..checkpoint import resolve_folder
    from ..errors import ForewordError
    from ..evaluate import evaluate, read_task, write_records
    from ..evaluate.evaluation import default_sampling
    from ..evaluate.harness import run_harness, task_name
    from ..evaluate.speed import measure_speed
    from ..evaluate.tasks import RESTAURANT, name_of, require_distinct
    from ..files import write_json
    from .loading import load_with_adapter
    from .output import console, show_json, show_table

    asked = [task.strip() for task in (tasks or "").split(",") if task.strip()]
    if not asked and not speed and document is None:
        raise ForewordError("eval needs --tasks, --speed or --document")
    own = [task for task in asked if (task.endswith(DATA) and "@" not in task) or task == RESTAURANT]
    others = [task for task in asked if task not in own]
    require_distinct([*map(name_of, own), *map(task_name, others)])
    network, tokenizer = load_with_adapter(model, adapter, dtype)
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    chosen = {name: value for name, value in given.items() if value is not None}
    results = []
    for path in own:
        task = read_task(path).limited(limit, seed)
        sampling = replace(default_sampling(task.kind, protocol), batch_size=batch_size, seed=seed, **chosen)
        results.append(evaluate(network, tokenizer, task, protocol=protocol, sampling=sampling, batch_size=batch_size))
    if others:
        results += run_harness(
            network, tokenizer, others, num_fewshot=num_fewshot, limit=limit, batch_size=batch_size, chat=chat
        )
        require_distinct([result.task for result in results])  # YAML files say theirs only now
    summary: dict[str, Any] = {"model": network.config.name_or_path, "adapter": adapter}
    summary["results"] = [result.to_dict() for result in results]
    if speed:
        folder = None if adapter is None else resolve_folder(adapter)
        summary["speed"] = measure_speed(network, adapter=folder, seed=seed).to_dict()
    if document is not None:
        from ..evaluate.document import evaluate_files

        paths, new = document.split(","), max_new_tokens or 64
        summary["document"] = evaluate_files(network, tokenizer, paths, questions, held_out, new, seed)
    if output is not None:
        for result in results:
            write_records(result, output)
        write_json(Path(output) / "eval.json", summary)
    if json:
        show_json(summary)
        return
    if results:
        show_table([row for result in results for row in _rows(result)])
    if speed:
        show_table([{"": name, "value": value} for name, value in summary["speed"].items()])
    if document is not None:
        show_table(summary["document"], "Questions about the document")
    if output is not None:
        console.print(f"{output}: eval.json, and what the model said to each example", highlight=False)


def _rows(result: Result) -> list[dict[str, Any]]:
    """A line for each score, in percent but for BLEU and what else is above 1."""
    rows = []
    for name, (value, low, high) in result.scores.items():
        percent = 0 <= value <= 1 and "bleu" not in name
        text, bounds = ("{:.1%}", "{:.1%} … {:.1%}") if percent else ("{:.2f}", "{:.2f} … {:.2f}")
        rows.append(
            {
                "task": result.task,
                "score": name,
                "value": text.format(value),
                "95 % interval": None if math.isnan(low) else bounds.format(low, high),
                "examples": len(result.records),
            }
        )
    return rows
