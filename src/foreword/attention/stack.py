"""The prefixes of one attention call, put together so that few calls read them all.

Prefixes in the tokens' softmax are one prefix, however many an adapter has: their keys stand side by side. Prefixes
with a softmax of their own stay apart within a row, but the first of every row can be read together, then the second.
Rows with different adapters get a prefix each, padded to the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernels import repeat_heads

COPIED = 2**24  # 64 MB in fp32: 32 rows with 1,300 prefix tokens each, on a layer with 3 key heads of width 64


@dataclass(frozen=True)
class Segment:
    """Keys and values that one softmax reads.

    Attributes:
        key, value: (1, G, l, D) for every row, or (B, G, l, D); a gated value has H heads, and so has its key.
        visible: (B, 1, 1, l), False where a row's prefix is padded or absent; None where none is.
    """

    key: Tensor
    value: Tensor
    visible: Tensor | None = None


@dataclass(frozen=True)
class Segments:
    """Everything that one attention call reads.

    Attributes:
        joint: the prefix in the tokens' softmax.
        apart: prefixes with a softmax of their own; each row reads one of each, or a row of zeros.
    """

    joint: Segment | None
    apart: list[Segment]


@dataclass(frozen=True)
class Piece:
    """Keys and values (1, G, l, D) for some rows of a batch, or for all (None); (n, G, l, D) for each row its own."""

    key: Tensor
    value: Tensor
    rows: Tensor | None


def together(joint: Sequence[Piece], apart: Sequence[Piece], batch: int) -> Segments | None:
    """Pieces in the tokens' softmax, and pieces with a softmax of their own → what B rows read.

    Pieces of one adapter have the same `rows`, those of two adapters disjoint ones; parallel streams, of which each row
    has keys of its own, may be rows of an adapter that has other pieces as well. None where a copy for each row would
    take more than `COPIED` numbers: long prefixes that many rows share are better read adapter by adapter.
    """
    shared = [piece for piece in joint if len(piece.key) == 1]
    streams = [piece for piece in joint if len(piece.key) > 1]
    in_softmax = [[side_by_side(group) for group in _by_rows(pieces)] for pieces in (shared, streams) if pieces]
    turns = itertools.zip_longest(*_by_rows(apart))  # the first of every adapter, then the second
    groups = [[piece for piece in turn if piece is not None] for turn in turns]
    if any(_copied(pieces, batch) > COPIED for pieces in (*in_softmax, *groups)):
        return None
    joined = [over_rows(pieces, batch) for pieces in in_softmax]
    return Segments(beside(joined, batch) if joined else None, [over_rows(pieces, batch) for pieces in groups])


def _copied(pieces: Sequence[Piece], batch: int) -> int:
    """How many numbers `over_rows` would write."""
    if not pieces or pieces[0].rows is None:
        return 0
    return batch * max(piece.key[0].numel() + piece.value[0].numel() for piece in pieces)


def _by_rows(pieces: Sequence[Piece]) -> list[list[Piece]]:
    return [list(group) for _, group in itertools.groupby(pieces, key=lambda piece: id(piece.rows))]


def side_by_side(pieces: Sequence[Piece]) -> Piece:
    """One prefix of several for the same rows."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(torch.cat([p.key for p in pieces], 2), torch.cat([p.value for p in pieces], 2), pieces[0].rows)


def beside(segments: Sequence[Segment], batch: int) -> Segment:
    """One segment of several that the same softmax reads."""
    if len(segments) == 1:
        return segments[0]
    rows = max(len(segment.key) for segment in segments)
    key = torch.cat([segment.key.expand(rows, -1, -1, -1) for segment in segments], 2)
    value = torch.cat([segment.value.expand(rows, -1, -1, -1) for segment in segments], 2)
    if all(segment.visible is None for segment in segments):
        return Segment(key, value)
    shown = [
        torch.ones(batch, 1, 1, s.key.shape[2], dtype=torch.bool, device=key.device) if s.visible is None else s.visible
        for s in segments
    ]
    return Segment(key, value, torch.cat(shown, -1))


def over_rows(pieces: Sequence[Piece], batch: int) -> Segment:
    """Of prefixes for disjoint rows, the prefix of each row of a batch; a row without one sees none."""
    if pieces[0].rows is None:
        return Segment(pieces[0].key, pieces[0].value)
    heads = max(piece.key.shape[1] for piece in pieces)
    longest = max(piece.key.shape[2] for piece in pieces)
    device = pieces[0].key.device
    prefixes = sum(len(piece.key) for piece in pieces)
    owner = torch.full((batch,), prefixes, device=device)  # index of each row's prefix; zeros stand behind the last
    lengths = torch.zeros(batch, dtype=torch.long, device=device)
    first = covered = 0
    for piece in pieces:
        assert piece.rows is not None, "an adapter for all rows is the only one"
        owner[piece.rows] = torch.arange(first, first + len(piece.key), device=device)
        lengths[piece.rows] = piece.key.shape[2]
        first += len(piece.key)
        covered += len(piece.rows)
    key = _table([piece.key for piece in pieces], heads, longest)[owner]
    value = _table([piece.value for piece in pieces], heads, longest)[owner]
    if covered == batch and all(piece.key.shape[2] == longest for piece in pieces):
        return Segment(key, value)
    return Segment(key, value, (torch.arange(longest, device=device) < lengths[:, None])[:, None, None])


def _table(tensors: Sequence[Tensor], heads: int, longest: int) -> Tensor:
    """(n_a, G, l_a, D) each → (Σ n_a + 1, heads, longest, D), zeros where there is nothing."""
    alike = [pad(repeat_heads(x, heads // x.shape[1]), (0, 0, 0, longest - x.shape[2])) for x in tensors]
    return torch.cat([*alike, torch.zeros_like(alike[0][:1])])
