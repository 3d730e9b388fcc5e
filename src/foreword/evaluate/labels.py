"""Classification by label words: the choices are the same for every text, so errors can be counted by class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .choices import Example, Record
from .intervals import Interval, proportion

RESAMPLES = 1_000


def with_labels(examples: Sequence[Example], labels: Sequence[str]) -> list[dict]:
    """The examples with `labels` as the choices of each: those of training, where the test part lacks some."""
    return [{**example, "choices": list(labels), "answer": labels.index(_right(example))} for example in examples]


def summarise_labels(records: Sequence[Record], seed: int = 0) -> dict[str, Interval]:
    """`accuracy`, and `macro_f1`: the mean over the classes that occur of F1 = 2 TP / (2 TP + FP + FN).

    The interval of the F1 is a bootstrap's over examples.
    """
    answers = np.array([record["answer"] for record in records])
    predicted = np.array([record["predicted"] for record in records])
    draws = np.random.default_rng(seed).integers(len(records), size=(RESAMPLES, len(records)))
    low, high = np.quantile([macro_f1(answers[draw], predicted[draw]) for draw in draws], [0.025, 0.975])
    f1 = Interval(macro_f1(answers, predicted), float(low), float(high))
    return {"accuracy": proportion([record["accuracy"] for record in records]), "macro_f1": f1}


def macro_f1(answers: np.ndarray, predicted: np.ndarray) -> float:
    """Answers (N,) and predictions (N,), both class indices → the unweighted mean of the classes' F1."""
    classes = np.union1d(answers, predicted)
    hits = [((answers == one) & (predicted == one)).sum() for one in classes]
    sizes = [(answers == one).sum() + (predicted == one).sum() for one in classes]
    return float(np.mean([2 * hit / size for hit, size in zip(hits, sizes, strict=True)]))


def _right(example: Example) -> str:
    return str(example["choices"][example["answer"]])
