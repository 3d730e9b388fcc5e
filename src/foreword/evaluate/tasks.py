"""Tasks in files: what is asked, and how an answer is scored."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..data import load
from ..data.builtin import restaurants
from ..data.formats import detect
from ..data.prompts import read_prompts
from ..data.reading import Row, read
from ..errors import ForewordError

Kind = Literal["choices", "labels", "generation", "restaurant"]
METRICS: Mapping[Kind, str] = {  # the score that stands for a task
    "choices": "accuracy",
    "labels": "accuracy",
    "generation": "rougeL",
    "restaurant": "facts",
}
RESTAURANT = "restaurant"  # the name of the built-in task
SPLITS = ("train", "test", "dev", "val", "validation", "all")  # file names that say nothing of the task


@dataclass(frozen=True)
class Task:
    """Questions of one kind.

    Attributes:
        name: what reports call it.
        kind: "choices" and "labels" (prompt, choices, answer), "generation" (prompt, references), or "restaurant".
        examples: with `row`, their place in the file.
    """

    name: str
    kind: Kind
    examples: list[dict[str, Any]]

    def limited(self, limit: int | None, seed: int = 0) -> Task:
        """A seeded draw of `limit` examples in their order; all of them where there are no more."""
        if limit is None or limit >= len(self.examples):
            return self
        chosen = sorted(random.Random(seed).sample(range(len(self.examples)), limit))
        return replace(self, examples=[self.examples[index] for index in chosen])


def read_task(
    path: str | Path, format: str | None = None, *, chat: bool | None = None, name: str | None = None
) -> Task:
    """The task in a data file (see `foreword.data.load`), or the built-in one by its name "restaurant".

    Rows of choices and labels are scored by log-likelihood, others by generation, against their completion or the list
    `references`. `chat` is as in `load`.

    Raises:
        ForewordError: as `load` does, and for plain text, which has no answers.
    """
    if str(path) == RESTAURANT:
        return Task(name or RESTAURANT, "restaurant", [dict(row) for row in restaurants("test")])
    rows = read(path)
    chosen = format or _format_of(rows)
    if chosen == "text":
        raise ForewordError(f"{path} holds plain text, which has no answers to score")
    kind: Kind = chosen if chosen in ("choices", "labels") else "generation"  # type: ignore[assignment]
    if "references" in rows[0].fields:
        prompts = read_prompts(path, chat=bool(chat))
        examples = [
            {"prompt": prompt, "references": _references(row), "row": row.number}
            for row, (_, prompt) in zip(rows, prompts, strict=True)
        ]
    elif kind == "generation":
        loaded = load(path, chosen, every_turn=False, chat=chat)
        examples = [{"prompt": e["prompt"], "references": [_content(e["completion"])], "row": e["row"]} for e in loaded]
    else:
        examples = [dict(example) for example in load(path, chosen, chat=chat)]
    return Task(name or name_of(path), kind, examples)


def name_of(path: str | Path) -> str:
    """What a task in a file is called: the file's name, and its folder's before one like "test"."""
    stem = Path(path).stem
    return f"{Path(path).absolute().parent.name}-{stem}" if stem in SPLITS else stem


def require_distinct(names: Sequence[str]) -> None:
    """Raise `ForewordError` where two tasks have one name: their records would have one file."""
    for name in names:
        if names.count(name) > 1:
            raise ForewordError(f"two of the tasks are called {name}; rename a file, or score one after the other")


def _format_of(rows: list[Row]) -> str:
    columns = {column for row in rows for column in row.fields}
    return "prompt-completion" if "references" in columns else detect(columns)


def _references(row: Row) -> list[str]:
    listed = row.fields.get("references")
    if not isinstance(listed, list) or not listed:
        raise row.error("field 'references' must be a list of one or more texts")
    return [row.string(text, f"text {number} in 'references'") for number, text in enumerate(listed, 1)]


def _content(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
