"""A base model with an adapter on it, as the commands that use adapters load them."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base import text_base
from ..checkpoint import SUMMARY, load, read_config, resolve_folder
from ..devices import to_fastest
from ..files import read_json
from ..model.rows import set_streams


def load_with_adapter(
    model: str | None, adapter: str | Path | None, dtype: str, streams: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base and its tokenizer, with the adapter active if there is one, on the accelerator if there is one.

    Without `model`, the base is the one that the adapter was trained on. `streams` is for adapters of parscale.
    """
    folder = None if adapter is None else resolve_folder(adapter)
    if model is None:
        model = "smollm2" if folder is None else read_config(folder)["base"]["model"]
    network, tokenizer = text_base(model, dtype=dtype)
    if folder is not None:
        load(network, folder)
    to_fastest(network)
    if streams is not None:
        set_streams(network, streams)
    return network, tokenizer


def as_prompt(text: str, tokenizer: PreTrainedTokenizerBase, raw: bool) -> str | list[dict[str, str]]:
    """A user's text as a message where the tokenizer has a chat template, unless it is to be read as it is."""
    return text if raw or not tokenizer.chat_template else [{"role": "user", "content": text}]


def trained_on_plain_text(folder: Path | None) -> bool:
    """Whether the training data of the adapter in a folder was plain text rather than messages."""
    path = None if folder is None else folder / SUMMARY
    return path is not None and path.is_file() and not read_json(path).get("messages", True)
