"""A memory matrix instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention.readers import KeyValue
from ..model.layout import Site
from .text import Start


@dataclass(frozen=True)
class Memory:
    """M_h (D, D_v) for each query head, free: as keys and values, K = I and V = M.

    Starts at zero. For `Kernel(mapped_keys=False)`. Trainable: Σ_layers H·D·D_v.
    """

    in_context: ClassVar[bool] = False
    length: ClassVar[int] = 1

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        return None, {
            site: MemoryMatrix(torch.zeros(site.num_heads, site.key_dim, site.value_dim, dtype=start.dtype))
            for site in sites
        }


class MemoryMatrix(nn.Module):
    """M (H, D, D_v) with the identity as its keys (H, D, D)."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)
        self.register_buffer("basis", torch.eye(matrix.shape[1], dtype=matrix.dtype), persistent=False)

    def forward(self, site: Site, shared: Any) -> KeyValue:
        return self.basis.expand(len(self.matrix), -1, -1), self.matrix
