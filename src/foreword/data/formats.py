"""The shapes that people keep training data in, read into the one that the trainer wants.

Every format but plain text becomes `prompt` + `completion`, both strings or both lists of messages. TRL's
`SFTTrainer` keeps the prompt of such examples out of the loss, whatever the chat template. Its other way,
`messages` with `assistant_only_loss=True`, needs `{% generation %}` marks that most templates lack; so a
conversation becomes one example for each assistant turn, with all that was said before as its prompt.
"""

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ForewordError
from . import choices, conversations
from .conversations import conversation, message, system
from .reading import Row, read

if TYPE_CHECKING:  # at run time inside `load`: importing it takes longer than `foreword --help` should
    from datasets import Dataset

Example = dict[str, Any]


def load(
    path: str | Path,
    format: str | None = None,
    split: str | None = None,
    *,
    every_turn: bool = True,
    chat: bool | None = None,
) -> "Dataset":
    """Read a data file into what `SFTTrainer` trains on with the loss on completions only.

    Args:
        path: a JSONL, JSON, CSV or Parquet file, or a folder with one for each split (see `reading.read`).
            In CSV, a cell that holds a list (`messages`, `choices`) is written as JSON.
        format: a key of `FORMATS`; by default the one that `detect` finds.
        split: the file of a folder, or the list of a JSON object, to read.
        every_turn: make an example of every assistant turn of a conversation, not of the last one only.
        chat: True for messages, which a chat template renders; False for plain strings. By default Alpaca
            and question-answer become messages, choices and labels strings, and prompt-completion stays as
            it is written.

    Returns:
        A dataset with the columns `prompt` and `completion` (strings, or lists of {role, content}), or `text`
        alone for plain text, which is trained on whole; for choices and labels also `choices` (strings, the
        candidate completions) and `answer` (the index of the right one); and `row`, the place in the file,
        counted from 1. Other columns are left out.

    Raises:
        ForewordError: names the file, row and field of the first thing that is wrong. No row is skipped.
    """
    from datasets import Dataset

    if format is not None and format not in FORMATS:
        raise ForewordError(f"unknown data format {format!r}; it must be one of {', '.join(FORMATS)}")
    rows = read(path, split)
    if format is None:
        try:
            format = detect({column for row in rows for column in row.fields})
        except ForewordError as error:
            raise ForewordError(f"{rows[0].file}: {error}") from None
    examples = [example | {"row": row.number} for row in rows for example in _examples(row, format, every_turn, chat)]
    _refuse_mixture(rows, examples)
    if format == "labels":
        names = sorted({example["completion"] for example in examples})
        examples = [example | {"choices": names, "answer": names.index(example["completion"])} for example in examples]
    return Dataset.from_list([_as_chat(example) for example in examples] if chat else examples)


def detect(columns: Iterable[str]) -> str:
    """The first format in `FORMATS` whose fields are all among `columns`.

    Raises:
        ForewordError: where there is none; names the nearest format and the fields that it lacks.
    """
    present = set(columns)
    variants = [(name, fields) for name, format in FORMATS.items() for fields in format.variants]
    for name, fields in variants:
        if fields <= present:
            return name
    name, fields = min(variants, key=lambda variant: len(variant[1] - present) / len(variant[1]))
    if not fields & present:
        name, fields = "prompt-completion", FORMATS["prompt-completion"].variants[0]
    found = reprlib.repr(sorted(present))
    raise ForewordError(f"the columns {found} fit no format; {name} lacks {_quoted(fields - present)}")


def _examples(row: Row, format: str, every_turn: bool, chat: bool | None) -> list[Example]:
    variants = FORMATS[format].variants
    missing = min((fields - row.fields.keys() for fields in variants), key=len)
    if missing:
        others = [name for name in FORMATS if any(v <= row.fields.keys() for v in FORMATS[name].variants)]
        mixed = f" (the row fits {others[0]}; a file holds one format)" if others else ""
        raise row.error(f"field {_quoted(missing)} is missing, which {format} needs{mixed}")
    example = FORMATS[format].parse(row, chat)
    messages = example.get("messages")
    if chat is False and (messages or isinstance(example.get("prompt"), list)):
        raise row.error("the row is a conversation, which only a chat template makes a text of; drop chat=False")
    return conversations.examples(row, messages, every_turn) if messages else [example]


def _refuse_mixture(rows: list[Row], examples: list[Example]) -> None:
    """Strings and lists of messages can't stand in one column."""
    kinds = {type(example.get("prompt")): example["row"] for example in reversed(examples)}  # its first row
    if len(kinds) > 1:
        first, second = sorted(kinds.values())
        row = next(row for row in rows if row.number == second)
        raise row.error(f"field 'prompt' must be of one kind in a file, a string or messages, as in {row.unit} {first}")


def _as_chat(example: Example) -> Example:
    """A plain prompt as a user's message, and its completion as the assistant's."""
    if not isinstance(example.get("prompt"), str):
        return example
    turns: Example = {
        "prompt": [message("user", example["prompt"])],
        "completion": [message("assistant", example["completion"].strip())],
    }
    if "choices" in example:
        turns["choices"] = [choice.strip() for choice in example["choices"]]
    return example | turns


def _quoted(fields: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(fields)))


# --- one parser per format: (row, chat) -> its example, or its whole conversation as `messages` -------------


def _messages(row: Row, chat: bool | None) -> Example:
    return {"messages": conversation(row, "messages")}


def _sharegpt(row: Row, chat: bool | None) -> Example:
    roles = conversations.SHAREGPT_ROLES
    turns = conversation(row, "conversations", role_key="from", content_key="value", roles=roles)
    return {"messages": system(row) + turns}


def _prompt_completion(row: Row, chat: bool | None) -> Example:
    if isinstance(row.fields["prompt"], str) or isinstance(row.fields["completion"], str):
        return {"prompt": row.text("prompt", required=False), "completion": row.text("completion")}
    completion = conversation(row, "completion")
    if any(turn["role"] != "assistant" for turn in completion):
        raise row.error("field 'completion' may hold assistant messages only: the loss is on all of it")
    return {"prompt": conversation(row, "prompt"), "completion": completion}


def _alpaca(row: Row, chat: bool | None) -> Example:
    instruction, output = row.text("instruction"), row.text("output")
    given = row.text("input", required=False)
    if chat is False:
        parts = {"Instruction": instruction, "Input": given}
        prompt = "".join(f"### {title}:\n{text}\n\n" for title, text in parts.items() if text)
        return {"prompt": f"{prompt}### Response:\n", "completion": output}
    question = message("user", f"{instruction}\n\n{given}" if given else instruction)
    return {"prompt": [*system(row), question], "completion": [message("assistant", output)]}


def _question_answer(row: Row, chat: bool | None) -> Example:
    question, answer = row.text("question"), row.text("answer")
    if chat is False:
        return {"prompt": f"Question: {question}\nAnswer:", "completion": f" {answer}"}
    return {"prompt": [message("user", question)], "completion": [message("assistant", answer)]}


def _choices(row: Row, chat: bool | None) -> Example:
    return choices.parse(row)


def _labels(row: Row, chat: bool | None) -> Example:
    field = "label_text" if "label_text" in row.fields else "label"
    label = row.fields[field]
    name = str(label) if isinstance(label, int) else row.text(field)
    return {"prompt": f"{row.text('text')}\nLabel:", "completion": f" {name}"}


def _text(row: Row, chat: bool | None) -> Example:
    return {"text": row.text("text")}


@dataclass(frozen=True)
class Format:
    """A parser, and the sets of fields that a row may have."""

    parse: Callable[[Row, bool | None], Example]
    variants: tuple[frozenset[str], ...]


def _format(parse: Callable[[Row, bool | None], Example], *fields: str) -> Format:
    return Format(parse, (frozenset(fields),))


FORMATS: Mapping[str, Format] = {  # in the order that `detect` tries
    "messages": _format(_messages, "messages"),
    "sharegpt": _format(_sharegpt, "conversations"),
    "prompt-completion": _format(_prompt_completion, "prompt", "completion"),
    "alpaca": _format(_alpaca, "instruction", "output"),
    "choices": Format(_choices, choices.VARIANTS),
    "question-answer": _format(_question_answer, "question", "answer"),
    "labels": _format(_labels, "text", "label"),
    "text": _format(_text, "text"),
}
