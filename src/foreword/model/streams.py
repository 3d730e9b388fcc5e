"""Parallel streams: a row of the user's batch is several rows inside the model, and one again behind its final norm.

The user gives and gets B rows. Row b has P_b streams, so a stack runs R = Σ P_b rows: stream 0 of every row first, then
stream 1 of every row that has one, …; row p·B + b where all have P. Each stream reads a prefix of its own, and an
aggregator joins the streams of a row. The KV cache holds R rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..errors import ForewordError

if TYPE_CHECKING:
    from .stream_part import StreamPart

PACKED = ("cu_seq_lens_q", "cu_seqlens_q", "seq_idx")  # arguments that lay several texts in a row
Rows = dict[str, Tensor | None]  # name → indices of its rows, or None for every row


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # a training step may use them later
def indices(names: tuple[str | None, ...], device: torch.device) -> Rows:
    """Name → the rows that have it among `names` (one a row), or None: all. Equal calls give the same tensors."""
    present = [name for name in dict.fromkeys(names) if name is not None]
    if len(present) == 1 and None not in names:
        return {present[0]: None}
    return {
        name: torch.tensor([row for row, other in enumerate(names) if other == name], device=device) for name in present
    }


class Tiling:
    """B rows of the user's as R rows of a stack.

    Attributes:
        counts: P of each of the B rows.
        rows: the user's row of each of the R.
        source, stream: (R,) that row, and the number of the stream, as tensors.
    """

    def __init__(self, counts: tuple[int, ...], device: torch.device) -> None:
        self.counts = counts
        order = [(p, b) for p in range(max(counts)) for b, count in enumerate(counts) if p < count]
        self.rows = tuple(b for _, b in order)
        self.source = torch.tensor(self.rows, device=device)
        self.stream = torch.tensor([p for p, _ in order], device=device)
        place = {pair: row for row, pair in enumerate(order)}
        self._place = torch.tensor(
            [[place.get((p, b), 0) for b in range(len(counts))] for p in range(max(counts))], device=device
        )  # (P, B): row of stream p of the user's row b

    def reorder(self, rows: Tensor) -> Tensor:
        """For the user's rows (B,) that are to take the places of the present ones, the same for the R rows."""
        rows = rows.to(self.source.device)
        return self._place[self.stream, rows[self.source]]

    def repeat(self, arguments: dict[str, Any]) -> None:
        """Give every stream a copy of its row in the arguments of a stack, in place."""
        packed = [name for name in PACKED if arguments.get(name) is not None]
        if packed:
            raise ForewordError(f"parallel streams can't read packed sequences ({packed[0]}); give each text a row")
        for name, value in arguments.items():
            dim = (
                1 if name == "position_ids" and isinstance(value, Tensor) and value.dim() == 3 else 0
            )  # (3, B, T): M-RoPE
            arguments[name] = self._repeated(value, dim)

    def _repeated(self, value: Any, dim: int = 0) -> Any:
        if isinstance(value, dict):
            return {name: self._repeated(one) for name, one in value.items()}
        if isinstance(value, BlockMask):
            return _repeat_block_mask(value, self.source)
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[dim] != len(self.counts):
            return value
        if value.dim() == 4 and len(value) == 1:  # a mask that all rows share
            return value
        return value.index_select(dim, self.source.to(value.device))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def tile(counts: tuple[int, ...], device: torch.device) -> Tiling | None:
    """The tiling of rows with P = `counts`; None where every row has one stream."""
    return Tiling(counts, device) if max(counts) > 1 else None


@dataclass(frozen=True)
class Reading:
    """One set of streams in one forward.

    Attributes:
        adapter: whose set it is.
        part: its prefixes and aggregator.
        rows: which of the R rows are its streams; None for all.
        users: which of the B rows they are streams of; None for all.
        stream: (n,) the number of each of `rows` within the set.
    """

    adapter: str
    part: StreamPart
    rows: Tensor | None
    users: Tensor | None
    stream: Tensor


@dataclass(frozen=True)
class Streams:
    """What a forward has to know of its streams.

    Attributes:
        tiling: the user's rows as rows of the stack.
        readings: set name → where it is read.
    """

    tiling: Tiling
    readings: dict[str, Reading]

    def join(self, hidden: Tensor) -> Tensor:
        """Final hidden states of the streams (R, T, d) → of the user's rows (B, T, d)."""
        joined = hidden[: len(self.tiling.counts)]  # stream 0 of every row
        for reading in self.readings.values():
            own = hidden if reading.rows is None else hidden[reading.rows.to(hidden.device)]
            aggregator = reading.part.aggregator
            assert aggregator is not None, "a set of one stream is not read"
            answer = aggregator(own.unflatten(0, (reading.part.streams, -1)))
            joined = answer if reading.users is None else joined.index_copy(0, reading.users.to(hidden.device), answer)
        return joined


class Sets:
    """The sets of one adapter, one for each P that it was made for, and which of them a forward reads.

    Attributes:
        parts: P → its prefixes and aggregator.
        chosen: the P that every forward reads. None: in training the sets take turns, otherwise the largest.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: dict[int, StreamPart] = {}
        self.chosen: int | None = None
        self._turn = 0

    def require(self, streams: int) -> int:
        """`streams`, where there is a set for it. Raises `ForewordError` with the sets there are."""
        if streams not in self.parts:
            sizes = ", ".join(map(str, sorted(self.parts)))
            raise ForewordError(f"adapter {self.name!r} has no set of {streams!r} streams; it has sets of {sizes}")
        return streams

    def next(self, training: bool) -> int:
        """The P of the next forward."""
        if self.chosen is not None:
            return self.chosen
        trained = [size for size in sorted(self.parts) if size > 1]
        if not training or len(trained) < 2:
            return max(self.parts)
        self._turn += 1
        return trained[(self._turn - 1) % len(trained)]


def set_name(adapter: str, streams: int) -> str:
    """Under which a set of an adapter stands in slots and plans."""
    return f"{adapter}@{streams}"


def read_streams(sets: dict[str, Sets], names: Sequence[str | None], tiling: Tiling) -> Streams:
    """The streams of rows that read the adapters `names` (one a row), laid out by `tiling`."""
    device = tiling.source.device
    keys = [
        None if name is None or count == 1 else set_name(name, count)
        for name, count in zip(names, tiling.counts, strict=True)
    ]
    users = indices(tuple(keys), device)
    rows = indices(tuple(keys[row] for row in tiling.rows), device)
    readings = {}
    for key, name, count in zip(keys, names, tiling.counts, strict=True):
        if key is not None and name is not None and key not in readings:
            stream = tiling.stream if rows[key] is None else tiling.stream[rows[key]]
            readings[key] = Reading(name, sets[name].parts[count], rows[key], users[key], stream)
    return Streams(tiling, readings)


def _repeat_block_mask(mask: BlockMask, source: Tensor) -> BlockMask:
    """The mask of flex attention for R rows, copies of those that it is for."""

    def of_source(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.mask_mod(source[row], head, query, key)

    def repeated(blocks: Any) -> Any:
        return blocks if blocks is None or len(blocks) == 1 else blocks.index_select(0, source.to(blocks.device))

    return BlockMask.from_kv_blocks(
        repeated(mask.kv_num_blocks),
        repeated(mask.kv_indices),
        repeated(mask.full_kv_num_blocks),
        repeated(mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=of_source,
        seq_lengths=mask.seq_lengths,
    )
