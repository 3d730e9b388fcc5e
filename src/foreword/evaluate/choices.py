"""Multiple choice by log-likelihood: the model's pick is the completion that it finds likeliest after the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data import to_text
from .intervals import Interval, proportion
from .likelihood import encode_pair, loglikelihoods

Example = Mapping[str, Any]  # prompt, choices, answer, as `foreword.data.load` gives them
Record = dict[str, Any]  # what became of one example


def score_choices(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, batch_size: int = 16
) -> list[Record]:
    """Score every choice of every example.

    Returns:
        For each example its `row`, `answer` (index of the right choice), the choices' `loglikelihoods` in nats,
        `predicted` = argmax, and `accuracy`, 1 or 0; and the same for the likelihood a character,
        `predicted_norm` and `accuracy_norm`, as lm-evaluation-harness normalises (it favours no short choice).
    """
    pairs, counts = [], []
    for example in examples:
        context, _ = to_text({"prompt": example["prompt"]}, tokenizer)
        templated = not isinstance(example["prompt"], str)
        pairs += [encode_pair(tokenizer, context, choice, templated=templated) for choice in example["choices"]]
        counts.append(len(example["choices"]))
    scores = loglikelihoods(model, pairs, batch_size=batch_size)
    records, begin = [], 0
    for number, (example, count) in enumerate(zip(examples, counts, strict=True), 1):
        logs = scores[begin : begin + count]
        begin += count
        norms = [log / max(1, len(choice.strip())) for log, choice in zip(logs, example["choices"], strict=True)]
        best, best_norm = logs.index(max(logs)), norms.index(max(norms))
        records.append(
            {
                "row": example.get("row", number),
                "answer": example["answer"],
                "loglikelihoods": logs,
                "predicted": best,
                "accuracy": float(best == example["answer"]),
                "predicted_norm": best_norm,
                "accuracy_norm": float(best_norm == example["answer"]),
            }
        )
    return records


def summarise_choices(records: Sequence[Record]) -> dict[str, Interval]:
    """`accuracy` and `accuracy_norm` with their intervals."""
    return {name: proportion([record[name] for record in records]) for name in ("accuracy", "accuracy_norm")}
