"""foreword chat"""

from __future__ import annotations

import sys

from ..generation import Sampling


def run(
    settings: Sampling,
    adapter: str | None = None,
    model: str | None = None,
    system: str | None = None,
    dtype: str = "auto",
    streams: int | None = None,
) -> None:
    """Talk to a model with an adapter. /reset forgets the conversation, /base and /adapter switch, /exit leaves.

    Examples:
        foreword chat --adapter out/support
        foreword chat --adapter out/support --temperature 0.7 --system "Answer in one sentence."

    Args:
        adapter: an adapter folder or Hub id; none gives the base model.
        model: a Hub id, a local folder, or "smollm2"; the adapter's own base by default.
        system: a system message to begin with.
        dtype: "auto", "float32", "bfloat16" or "float16".
        streams: how many parallel streams to read, of those that an adapter of parscale has; the most by default.
    """
    import torch
    from transformers import TextStreamer

    from ..checkpoint import resolve_folder
    from ..data import to_text
    from ..generation import encode
    from ..model.attach import adapters, set_active
    from .loading import as_prompt, load_with_adapter, trained_on_plain_text
    from .output import console

    folder = None if adapter is None else resolve_folder(adapter)
    network, tokenizer = load_with_adapter(model, folder, dtype, streams)
    names = adapters(network)
    raw = trained_on_plain_text(folder) or not tokenizer.chat_template
    opening = [{"role": "system", "content": system}] if system and not raw else []
    messages = list(opening)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(settings.seed)
    interactive = sys.stdin.isatty()
    if interactive:
        console.print(
            f"{network.name_or_path} with {adapter or 'no adapter'}. /reset, /base, /adapter, /exit.", style="dim"
        )
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(opening)
        elif text == "/base" or (text == "/adapter" and names):
            set_active(network, None if text == "/base" else names[0])
        elif text.startswith("/"):
            console.print("commands: /reset, /base, /adapter, /exit", style="dim")
        elif text:
            prompt = text if raw else [*messages, *as_prompt(text, tokenizer, raw)]
            inputs = encode(tokenizer, [to_text({"prompt": prompt}, tokenizer)[0]], [prompt]).to(network.device)
            with torch.no_grad():
                out = network.generate(
                    **inputs, **settings.arguments(), streamer=streamer, pad_token_id=tokenizer.pad_token_id
                )
            if not raw:
                said = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
                messages = [*prompt, {"role": "assistant", "content": said.strip()}]
