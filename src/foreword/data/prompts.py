"""Prompts to answer: rows like those of training data, without the completion."""

from pathlib import Path
from typing import Any

from .conversations import conversation, message, system
from .reading import Row, read

Prompt = str | list[dict[str, str]]


def read_prompts(path: str | Path, *, chat: bool = False) -> list[tuple[dict[str, Any], Prompt]]:
    """The rows of a file with the prompt of each.

    A row has `prompt` (a string or a list of messages), `messages`, or Alpaca's `instruction` with or without `input`;
    of messages that end in an assistant turn, the prompt is what comes before that turn. `chat` makes messages of
    strings.

    Raises:
        ForewordError: names the file and row without any of these, or with an empty one.
    """
    return [(row.fields, _prompt(row, chat)) for row in read(path)]


def _prompt(row: Row, chat: bool) -> Prompt:
    fields = row.fields
    if isinstance(fields.get("prompt"), str):
        text = row.text("prompt")
        return [message("user", text)] if chat else text
    for name in ("prompt", "messages"):
        if name in fields:
            turns = conversation(row, name)
            prompt = turns[:-1] if turns[-1]["role"] == "assistant" else turns
            if not prompt:
                raise row.error(f"field {name!r} has nothing before the assistant's turn")
            return prompt
    if "instruction" in fields:
        given = row.text("input", required=False)
        question = row.text("instruction") + (f"\n\n{given}" if given else "")
        return [*system(row), message("user", question)]
    raise row.error("the row has no prompt; it needs the field 'prompt', 'messages' or 'instruction'")
