"""From a document to a cartridge: chunks, self-study, distillation."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint import SUMMARY, load
from ..errors import ForewordError
from ..files import read_json, write_json
from ..methods.cartridge import Cartridge, require_decoder
from ..model.host import host_of
from ..serve.jobs import Decoding
from ..space import require_choice, require_positive
from ..train import Training, TrainResult
from .chunks import spaced
from .dialogue import Dialogue
from .distill import distill
from .seeds import SUMMARISE
from .self_study import SelfStudy, study
from .writing import Writer, base_only

RUN = "compression.json"  # what the run in a folder is


@dataclass(frozen=True)
class Compression(SelfStudy):
    """How to compress a document.

    Args:
        length: p, tokens of the cartridge.
        init: the text whose keys and values it starts from: the document's "first" tokens, "spaced" spans of all of it,
            or a "summary" that the model writes.
        conversations: how many to write in self-study, rounded up to whole batches.
        shortest_chunk: tokens of the document that a conversation is about, at least.
        longest_chunk: at most; drawn for each batch.
        question_tokens: longest question.
        answer_tokens: longest answer.
        temperature: of both; 0 takes the likeliest tokens.
        top_k: how many log-probabilities of the teacher to keep at each token.
        batch_size: conversations written at a time.
        learning_rate: None takes the method's own default.
        num_train_epochs: passes over the conversations.
        per_device_train_batch_size: conversations of a step on one device.
        gradient_accumulation_steps: batches whose gradients add up to one step.
        save_steps: steps between two checkpoints.
        logging_steps: steps between two log lines.
        seed: of self-study, initialisation and data order.
    """

    length: int = 128
    init: Literal["first", "spaced", "summary"] = "first"
    learning_rate: float | None = None
    num_train_epochs: float = 2.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    save_steps: int = 50
    logging_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "length")
        require_choice(self, init=("first", "spaced", "summary"))

    def study(self) -> SelfStudy:
        """The part that is self-study."""
        return SelfStudy(**{field.name: getattr(self, field.name) for field in dataclasses.fields(SelfStudy)})

    def training(self, output: str | Path) -> Training:
        """The part that is training. Goes on from a checkpoint in `output` if there is one."""
        same = ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps")
        return Training(
            output_dir=str(output),
            save_strategy="steps",
            resume_from_checkpoint=True,
            **{name: getattr(self, name) for name in (*same, "save_steps", "logging_steps", "seed")},
        )


def compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    settings: Compression,
    output: str | Path,
    name: str = "default",
) -> TrainResult:
    """Compress a document into a cartridge, saved to the folder `output` and active on the model.

    The same call again goes on where a killed one stopped, in self-study and in training; after a finished one, it
    loads the cartridge.

    Args:
        model, tokenizer: the base, as `foreword.base` loads it. No parameter of it changes.
        text: of the document (see `read_documents`), longer than the model's context if it is.
        settings: see `Compression`.
        name: of the adapter on the model.

    Raises:
        ForewordError: the document has fewer tokens than the cartridge, `output` holds another run, or as
            `foreword.train.train` and `study` raise.
    """
    with base_only(model):
        require_decoder(host_of(model).layout)
    output = Path(output)
    dialogue = Dialogue(tokenizer)
    document = dialogue.encode(text)
    require_length(dialogue, document, settings.length)
    about = {
        "document": {"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": len(document)},
        "model": model.config.name_or_path,
        "settings": asdict(settings),
    }
    _claim(output, about)
    if (output / SUMMARY).exists() and "document" in (done := read_json(output / SUMMARY)):
        return TrainResult(load(model, output, name), output, done["history"], done["seconds"])
    shards = study(model, tokenizer, document, settings.study())
    start = init_ids(model, dialogue, document, settings)
    result = distill(model, tokenizer, Cartridge(settings.length), start, shards, settings.training(output), name=name)
    write_json(output / SUMMARY, read_json(output / SUMMARY) | {"messages": dialogue.chat} | about)
    return result


def require_length(dialogue: Dialogue, document: Sequence[int], length: int) -> None:
    """Raise `ForewordError` where a cartridge of `length` tokens can't start from a document."""
    frame = len(dialogue.head) + len(dialogue.tail)
    if len(document) + frame < length:
        raise ForewordError(
            f"the document has {len(document)} tokens and the prompt around it {frame}, together less than a cartridge "
            f"of {length}: give a smaller length"
        )
    if length <= frame:
        raise ForewordError(f"a cartridge of {length} has no room for the prompt around a document, {frame} tokens")


def init_ids(model: PreTrainedModel, dialogue: Dialogue, document: Sequence[int], settings: Compression) -> list[int]:
    """The p token ids that a cartridge starts from: a text in the context, as the chat template puts it there."""
    total = settings.length - len(dialogue.head) - len(dialogue.tail)
    if settings.init == "first":
        text = list(document[:total])
    else:
        text = spaced(document, total)
        if settings.init == "summary":
            text = [*summary_of(model, dialogue, document, total, settings), *text][:total]
    return dialogue.head + text + dialogue.tail


def summary_of(
    model: PreTrainedModel, dialogue: Dialogue, document: Sequence[int], total: int, settings: Compression
) -> list[int]:
    """Up to `total` token ids of summaries that the model writes of pieces of the document, in order."""
    pieces = -(-len(document) // settings.longest_chunk)
    size = -(-len(document) // pieces)
    chunks = [document[start : start + size] for start in range(0, len(document), size)]
    prompts = [dialogue.ids(dialogue.prompt(SUMMARISE), text=chunk) for chunk in chunks]
    each = -(-total // len(chunks))
    decoding = Decoding(max_tokens=each, seed=settings.seed)
    longest = max(map(len, prompts)) + each
    with base_only(model), Writer(model, dialogue.tokenizer, settings.batch_size, longest) as writer:
        return [token for ids in writer.replies(prompts, decoding) for token in ids][:total]


def _claim(output: Path, about: dict[str, Any]) -> None:
    """Note what the run in `output` is. Raises `ForewordError` where it is another one."""
    path = output / RUN
    if not path.exists():
        write_json(path, about)
        return
    before = read_json(path)
    for key in about:
        if before.get(key) != about[key]:
            raise ForewordError(
                f"{output} holds a compression with another {_difference(before.get(key), about[key]) or key}; choose "
                "another folder"
            )


def _difference(before: Any, now: Any) -> str | None:
    """The first field that two objects differ in."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None
    changed = (name for name, value in now.items() if before.get(name) != value)
    return next((f"{name} ({before.get(name)}, not {now[name]})" for name in changed), None)
