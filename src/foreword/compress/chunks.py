"""Pieces of a tokenised document."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` … `start + len(ids)` of a document."""

    start: int
    ids: list[int]


def draw_chunks(document: Sequence[int], shortest: int, longest: int, count: int, seed: str) -> list[Chunk]:
    """`count` chunks of one length at random places.

    The length is uniform between `shortest` and `longest` tokens, at most that of the document; one length for all, so
    that they make a batch without padding.
    """
    generator = random.Random(seed)
    length = min(generator.randint(shortest, longest), len(document))
    starts = [generator.randint(0, len(document) - length) for _ in range(count)]
    return [Chunk(start, list(document[start : start + length])) for start in starts]


def spaced(document: Sequence[int], total: int, span: int = 64) -> list[int]:
    """`total` tokens of a document that has as many: spans of about `span` tokens, evenly spaced from its start to its
    end."""
    count = max(1, round(total / span))
    ids: list[int] = []
    for index in range(count):
        size = (total * (index + 1)) // count - (total * index) // count
        start = 0 if count == 1 else (len(document) - size) * index // (count - 1)
        ids += document[start : start + size]
    return ids
