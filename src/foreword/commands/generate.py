"""foreword generate"""

from __future__ import annotations

import json
from typing import Any

from ..generation import Prompt, Sampling


def run(
    settings: Sampling,
    prompt: str | None = None,
    input: str | None = None,
    output: str | None = None,
    adapter: str | None = None,
    model: str | None = None,
    dtype: str = "auto",
    raw: bool | None = None,
    streams: int | None = None,
) -> None:
    """Answer one prompt, or every row of a file.

    Examples:
        foreword generate --adapter out/support --prompt "My order is late."
        foreword generate --adapter out/support --input questions.jsonl --output answers.jsonl --batch_size 32

    A row of the file has "prompt" (text or messages), "messages", or "instruction" with or without "input". Its
    answer is written beside its other fields as "answer".

    Args:
        prompt: one prompt.
        input: a JSONL file of prompts.
        output: where the JSONL with the answers goes; standard output by default.
        adapter: an adapter folder or Hub id; none gives the base model.
        model: a Hub id, a local folder, or "smollm2"; the adapter's own base by default.
        dtype: "auto", "float32", "bfloat16" or "float16".
        raw: read prompts as they are, without the chat template; by default as the adapter was trained.
        streams: how many parallel streams to read, of those that an adapter of parscale has; the most by default.
    """
    from ..checkpoint import resolve_folder
    from ..data import read_prompts
    from ..errors import ForewordError
    from ..files import write_text
    from ..generation import answer
    from .loading import as_prompt, load_with_adapter, trained_on_plain_text

    if (prompt is None) == (input is None):
        raise ForewordError("give either --prompt TEXT or --input FILE.jsonl")
    rows: list[tuple[dict[str, Any], Prompt]] = [({}, prompt or "")] if input is None else read_prompts(input)
    folder = None if adapter is None else resolve_folder(adapter)
    network, tokenizer = load_with_adapter(model, folder, dtype, streams)
    raw = trained_on_plain_text(folder) if raw is None else raw
    prompts = [as_prompt(one, tokenizer, raw) if isinstance(one, str) else one for _, one in rows]
    answers = answer(network, tokenizer, prompts, settings)
    if input is None:
        print(answers[0])
        return
    lines = [
        json.dumps(fields | {"answer": one}, ensure_ascii=False) for (fields, _), one in zip(rows, answers, strict=True)
    ]
    if output is None:
        print("\n".join(lines))
    else:
        write_text(output, "\n".join(lines) + "\n")
