"""Conversations about a document with the teacher's distributions, in safetensors files that are whole or absent."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ForewordError
from ..files import atomic_path
from ..model.prompt import IGNORED


@dataclass(frozen=True)
class Conversation:
    """A question and an answer about a chunk of a document.

    Attributes:
        kind: of seed prompt.
        question, answer: what was written.
        start, length: of the chunk, in tokens of the document.
        ids: the conversation as the student reads it, without the chunk.
        teacher_ids, teacher_logprobs: (n, k) the teacher's likeliest tokens, and their log-probabilities, for each of
            the last n of `ids`.
    """

    kind: str
    question: str
    answer: str
    start: int
    length: int
    ids: list[int]
    teacher_ids: Tensor
    teacher_logprobs: Tensor

    def example(self) -> dict[str, Any]:
        """What a trainer collates: labels are `ids` where a token is learned."""
        learned = len(self.teacher_ids)
        labels = [IGNORED] * (len(self.ids) - learned) + self.ids[len(self.ids) - learned :]
        return {
            "input_ids": self.ids,
            "attention_mask": [1] * len(self.ids),
            "labels": labels,
            "teacher_ids": self.teacher_ids,
            "teacher_logprobs": self.teacher_logprobs,
        }


def write_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations to a file."""
    told = [
        {"kind": c.kind, "question": c.question, "answer": c.answer, "start": c.start, "length": c.length}
        for c in conversations
    ]
    tensors = {
        "ids": torch.tensor([token for c in conversations for token in c.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(c.ids) for c in conversations]),
        "learned": torch.tensor([len(c.teacher_ids) for c in conversations]),
        "teacher_ids": torch.cat([c.teacher_ids.int() for c in conversations]),
        "teacher_logprobs": torch.cat([c.teacher_logprobs.float() for c in conversations]),
    }
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"conversations": json.dumps(told, ensure_ascii=False)})


def read_shard(path: Path) -> list[Conversation]:
    """The conversations of a file. Raises `ForewordError` where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["conversations"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ForewordError(f"{path} is damaged: {error}; delete it and run the command again") from error
    spans, rows = (_spans(tensors[name].tolist()) for name in ("lengths", "learned"))
    ids = tensors["ids"].tolist()
    return [
        Conversation(
            **one,
            ids=ids[span],
            teacher_ids=tensors["teacher_ids"][row],
            teacher_logprobs=tensors["teacher_logprobs"][row],
        )
        for one, span, row in zip(told, spans, rows, strict=True)
    ]


def _spans(lengths: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]


class Conversations:
    """The conversations of some shards, read when they are asked for.

    Args:
        shards: files of `write_shard`.
        keep: shards to keep in memory.
    """

    def __init__(self, shards: Sequence[Path], keep: int = 256) -> None:
        self.shards = list(shards)
        self._read = functools.lru_cache(maxsize=keep)(read_shard)
        self._places = [(shard, row) for shard in self.shards for row in range(len(self._read(shard)))]

    def __len__(self) -> int:
        return len(self._places)

    def conversation(self, index: int) -> Conversation:
        shard, row = self._places[index]
        return self._read(shard)[row]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.conversation(index).example()


def collate(examples: Sequence[dict[str, Any]], pad_id: int = 0) -> dict[str, Tensor]:
    """Examples of `Conversation.example` as a batch, padded on the right.

    Returns:
        input_ids, attention_mask and labels (B, T), and teacher_ids and teacher_logprobs (N, k) of the N learned
        tokens, row by row.
    """
    width = max(len(example["input_ids"]) for example in examples)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([[*one[name], *[value] * (width - len(one[name]))] for one in examples])

    return {
        "input_ids": padded("input_ids", pad_id),
        "attention_mask": padded("attention_mask", 0),
        "labels": padded("labels", IGNORED),
        "teacher_ids": torch.cat([example["teacher_ids"] for example in examples]).long(),
        "teacher_logprobs": torch.cat([example["teacher_logprobs"] for example in examples]),
    }
