"""Multiple-choice records: the shapes that benchmarks publish, read into one.

The common form is a prompt, the candidate completions and the index of the right one. A completion begins
with a space, so that prompt + completion is the text that a model scores.
"""

from string import ascii_uppercase
from typing import Any

from .reading import Row, describe

VARIANTS = (
    frozenset({"question", "choices", "answerKey"}),  # ARC
    frozenset({"question", "choices", "answer"}),  # MMLU
    frozenset({"question_stem", "choices", "answerKey"}),  # OpenBookQA
    frozenset({"premise", "choice1", "choice2", "question", "label"}),  # COPA
    frozenset({"ctx", "endings", "label"}),  # HellaSwag
    frozenset({"question", "mc1_targets"}),  # TruthfulQA
)


def parse(row: Row) -> dict[str, Any]:
    """{prompt, completion, choices, answer} of a row that has the fields of one of `VARIANTS`."""
    if "premise" in row.fields:
        prompt, options, answer = _copa(row)
    elif "ctx" in row.fields:
        prompt, (options, _) = row.text("ctx"), _options(row, "endings")
        answer = _index(row, "label", options)
    else:
        stem = "question" if "question" in row.fields else "question_stem"
        prompt = f"Question: {row.text(stem)}\nAnswer:"
        options, answer = _question(row) if "choices" in row.fields else _truthful(row)
    row.string(options[answer], "the right choice")  # a blank wrong one is only easy to rule out
    completions = [f" {option.strip()}" for option in options]
    return {"prompt": prompt, "completion": completions[answer], "choices": completions, "answer": answer}


def _question(row: Row) -> tuple[list[str], int]:
    options, labels = _options(row, "choices")
    key = "answer" if "answer" in row.fields else "answerKey"
    return options, _index(row, key, options, labels)


def _truthful(row: Row) -> tuple[list[str], int]:
    """`mc1_targets` = {choices, labels}, where one label is 1 and the others are 0."""
    options, labels = _options(row, "mc1_targets", texts="choices", names="labels")
    if sorted(labels) != ["0"] * (len(options) - 1) + ["1"]:
        raise row.error("'labels' in field 'mc1_targets' must have a 1 for one choice and a 0 for each other")
    return options, labels.index("1")


def _copa(row: Row) -> tuple[str, list[str], int]:
    """The premise, joined to either alternative by "because" (its cause) or "so" (its effect)."""
    joints = {"cause": "because", "effect": "so"}
    kind = row.text("question")
    if kind not in joints:
        raise row.error(f"field 'question' {describe(kind)}; beside 'premise' it must be cause or effect")
    options = [row.text("choice1").strip(), row.text("choice2").strip()]
    prompt = f"{row.text('premise').strip().removesuffix('.')} {joints[kind]}"
    return prompt, [option[0].lower() + option[1:] for option in options], _index(row, "label", options)


def _options(row: Row, field: str, texts: str = "text", names: str = "label") -> tuple[list[str], list[str]]:
    """The candidates in `field`, a list or an object {texts: [...], names: [...]}, and their labels or []."""
    value = row.fields[field]
    labels = value.get(names) if isinstance(value, dict) else None
    value = value.get(texts) if isinstance(value, dict) else value
    if not isinstance(value, list) or len(value) < 2:
        raise row.error(f"field {field!r} must be a list of two or more choices, or an object with one as {texts!r}")
    options = [row.string(option, f"choice {n} in {field!r}", blank=True) for n, option in enumerate(value, start=1)]
    if labels is not None and (not isinstance(labels, list) or len(labels) != len(options)):
        raise row.error(f"{names!r} in field {field!r} must be a list with one entry for each choice")
    return options, [str(label) for label in labels or []]


def _index(row: Row, field: str, options: list[str], labels: list[str] | None = None) -> int:
    """The choice that `field` names, by a label of the record, its text, a letter or a number from 0."""
    value = row.fields.get(field)
    texts = options if isinstance(value, str) else []
    numbers = [str(index) for index in range(len(options))]
    for names in (labels or [], texts, list(ascii_uppercase[: len(options)]), numbers):
        if names.count(str(value)) == 1:
            return names.index(str(value))
    wanted = f"a number below {len(options)}, or the label, letter or text of one choice"
    raise row.error(f"field {field!r} {describe(value)}; it must be {wanted}")
