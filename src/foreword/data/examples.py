"""What one does with loaded examples: hold some out, and see them as the model does."""

import random
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..errors import ForewordError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def split(dataset: "Dataset", size: int | float, seed: int = 0) -> tuple["Dataset", "Dataset"]:
    """Hold rows out for evaluation: (training examples, evaluation examples), each in the order of `dataset`.

    Examples with the same `row` (the turns of one conversation) stay together, so that no evaluation prompt
    contains, or is contained in, a conversation that was trained on.

    Args:
        size: the number of rows to hold out, or their fraction in (0, 1), rounded, at least one.
        seed: of the draw.

    Raises:
        ForewordError: where either part would be empty.
    """
    groups = list(dataset["row"]) if "row" in dataset.column_names else list(range(len(dataset)))
    rows = sorted(set(groups))
    count = max(1, round(size * len(rows))) if 0 < size < 1 else size
    if not isinstance(count, int) or not 0 < count < len(rows):
        wanted = "a count that leaves some to train on, or a fraction between 0 and 1"
        raise ForewordError(f"can't hold out {size} of {len(rows)} rows for evaluation; give {wanted}")
    held_out = set(random.Random(seed).sample(rows, count))
    return (
        dataset.select([index for index, row in enumerate(groups) if row not in held_out]),
        dataset.select([index for index, row in enumerate(groups) if row in held_out]),
    )


def to_text(example: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """The prompt as the model reads it, and the completion that the loss is on, both as strings.

    Plain strings stay as they are (the trainer adds the end-of-text token), and plain text is all completion.
    Messages go through the tokenizer's chat template, the prompt up to where the assistant's turn opens. Where the
    template opens it with what a finished turn lacks ("<think>"), the prompt of an example with a completion ends
    before that: both together are the conversation. An example without a completion gives "" for it.

    Raises:
        ForewordError: where messages meet a tokenizer without a chat template, or a template refuses them.
    """
    prompt, completion = example.get("prompt", ""), example.get("completion", example.get("text"))
    if isinstance(prompt, str):
        return prompt, completion or ""
    opened = _render(prompt, tokenizer, add_generation_prompt=True)
    if completion is None:
        return opened, ""
    whole = _render(prompt + completion, tokenizer, add_generation_prompt=False)
    begun = len([*takewhile(lambda pair: pair[0] == pair[1], zip(opened, whole, strict=False))])
    return whole[:begun], whole[begun:]


def _render(
    messages: list[dict[str, str]], tokenizer: "PreTrainedTokenizerBase", *, add_generation_prompt: bool
) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        base = tokenizer.name_or_path or "this base"
        remedy = "use an instruct base, set tokenizer.chat_template, or give plain strings (Alpaca: chat=False)"
        raise ForewordError(f"field 'prompt' holds messages, but {base} has no chat template; {remedy}")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in messages)
        reason = " ".join(str(error).split())
        raise ForewordError(f"the chat template refuses messages with the roles {roles}: {reason}") from error
