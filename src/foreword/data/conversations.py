"""Lists of messages: checked, in one spelling, and cut into examples that end in an assistant turn."""

from collections.abc import Mapping
from typing import Any

from .reading import Row, describe

Message = dict[str, str]  # {"role": "user", "content": "..."}

ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
SHAREGPT_ROLES = ROLES | {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def system(row: Row) -> list[Message]:
    """The system message that some Alpaca and ShareGPT files keep in a field of its own, if there is one."""
    content = row.text("system", required=False)
    return [message("system", content)] if content else []


def conversation(
    row: Row,
    field: str,
    *,
    role_key: str = "role",
    content_key: str = "content",
    roles: Mapping[str, str] = ROLES,
) -> list[Message]:
    """The messages in `field` as {role, content}, with `roles` translated; no assistant turn is blank."""
    turns = row.fields[field]
    if not isinstance(turns, list) or not turns:
        raise row.error(f"field {field!r} {describe(turns)}; it must be a list of messages")
    return [
        _checked(row, turn, f"message {number} in {field!r}", role_key, content_key, roles)
        for number, turn in enumerate(turns, start=1)
    ]


def _checked(row: Row, turn: Any, what: str, role_key: str, content_key: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise row.error(f"{what} {describe(turn)}; it must be an object with {role_key!r} and {content_key!r}")
    role = turn.get(role_key)
    if not isinstance(role, str) or role not in roles:
        raise row.error(f"{what}: {role_key!r} {describe(role)}; it must be one of {', '.join(roles)}")
    if turn.get("tool_calls"):
        raise row.error(f"{what}: 'tool_calls' can't be trained on; write the call into {content_key!r}")
    blank = roles[role] != "assistant"
    return message(roles[role], row.string(turn.get(content_key), f"{what}: {content_key!r}", blank=blank))


def examples(row: Row, turns: list[Message], every_turn: bool) -> list[dict[str, list[Message]]]:
    """One example for each assistant turn (or the last only): {prompt: all before it, completion: [it]}."""
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise row.error("the conversation has no assistant turn to learn from")
    if answers[0] == 0:
        raise row.error("the conversation begins with an assistant turn; a user or system turn must come first")
    return [
        {"prompt": turns[:index], "completion": [turns[index]]} for index in (answers if every_turn else answers[-1:])
    ]
