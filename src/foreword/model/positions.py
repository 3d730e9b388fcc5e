"""Token positions: they count from the first real token of a row, and behind the prefix where a model looks them up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .part import Part


def positions_of(
    arguments: dict[str, Any],
    cache: Any,
    rows: dict[str, Tensor | None],
    shifts: dict[str, int],
    batch: int,
    length: int,
    device: torch.device,
) -> Tensor | None:
    """Position ids (B, T) that count from each row's first real token, plus the shift of its adapter.

    None where the model's own are right. `generate` passes the same ids; a plain forward with left padding doesn't.

    Args:
        arguments: of the stack, by name.
        cache: the KV cache, whose tokens come first; None without one.
        rows: adapter → indices of the rows that read it, or None for all.
        shifts: adapter → by how many positions it moves the text.
    """
    positions = arguments.get("position_ids")
    mask = arguments.get("attention_mask")
    if positions is None and isinstance(mask, Tensor) and mask.dim() == 2:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    if not any(shifts.values()):
        return positions
    if positions is None:
        past = 0 if cache is None else int(cache.get_seq_length())
        positions = torch.arange(past, past + length, device=device)[None]
    return moved(positions, batch, rows, shifts)


def shift_of(parts: list[Part | None]) -> int:
    """By how many positions the parts of an adapter move the text."""
    return sum(part.shift for part in parts if part is not None)


def moved(positions: Tensor, batch: int, rows: dict[str, Tensor | None], shifts: dict[str, int]) -> Tensor:
    """Positions (1 | B, T) plus the shift of what each row reads, (B, T)."""
    positions = positions.expand(batch, -1).clone()
    for name, own in rows.items():
        if own is None:
            positions += shifts[name]
        else:
            positions[own] += shifts[name]
    return positions
