"""Prompts in, answers out: batches, the chat template, left padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .errors import ForewordError

Prompt = str | list[dict[str, str]]  # plain text, or messages of {role, content}


@dataclass
class Sampling:
    """How to generate.

    Args:
        max_new_tokens: longest answer in tokens.
        temperature: 0 takes the likeliest token at every step; above 0 samples.
        top_p: sample from the likeliest tokens of this total probability.
        num_beams: beams of a beam search; 1 for none.
        seed: of sampling.
        batch_size: prompts of a batch.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    num_beams: int = 1
    seed: int = 0
    batch_size: int = 16

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `model.generate`."""
        sampled = {"temperature": self.temperature, "top_p": self.top_p} if self.temperature > 0 else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.temperature > 0,
            "num_beams": self.num_beams,
            **sampled,
        }


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling | None = None,
    *,
    description: str = "Generating",
) -> list[str]:
    """The model's answer to each prompt, in their order.

    Prompts of similar length share a batch, padded on the left. Messages go through the tokenizer's chat template;
    plain text is read as it is. A progress bar shows on a terminal.

    Raises:
        ForewordError: a prompt is empty, or holds messages that the tokenizer has no chat template for.
    """
    from .data import to_text

    sampling = sampling or Sampling()
    texts = [to_text({"prompt": prompt}, tokenizer)[0] for prompt in prompts]
    for number, text in enumerate(texts, 1):
        if not text:
            raise ForewordError(f"prompt {number} is empty")
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    batches = [by_length[start : start + sampling.batch_size] for start in range(0, len(texts), sampling.batch_size)]
    answers = [""] * len(texts)
    torch.manual_seed(sampling.seed)
    for batch in track(batches, description, console=stderr(), transient=True):
        inputs = encode(tokenizer, [texts[index] for index in batch], [prompts[index] for index in batch]).to(
            model.device
        )
        with torch.no_grad():
            out = model.generate(**inputs, **sampling.arguments(), pad_token_id=tokenizer.pad_token_id)
        new = out if model.config.is_encoder_decoder else out[:, inputs["input_ids"].shape[1] :]
        for index, text in zip(batch, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[index] = text.strip()
    return answers


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prompts: Sequence[Prompt]) -> Any:
    """A left-padded batch of rendered prompts, which are all messages or all plain text."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    special = takes_special_tokens(prompts[0])
    return tokenizer(list(texts), padding=True, padding_side="left", return_tensors="pt", add_special_tokens=special)


def takes_special_tokens(prompt: Prompt) -> bool:
    """Whether the tokenizer adds its special tokens to a rendered prompt; a chat template has put them in already."""
    return isinstance(prompt, str)


def stderr() -> Any:
    """A console for progress bars, quiet where stderr is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    return console
