"""Keys and values as free parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..attention.merge import full_precision
from ..attention.readers import KeyValue
from ..model.layout import Site
from .text import Start

Init = Literal["text", "normal", "zero"]


@dataclass(frozen=True)
class Direct:
    """K_i = P_k^i, V_i = P_v^i: parameters (G, l, D) for each layer, in cache space (Li & Liang 2021, without the MLP).

    Trainable: Σ_layers l·G·(D_k + D_v) = 2·L·l·d_kv.

    Args:
        length: l, prefix tokens.
        init: "text" (the model's own keys and values for real tokens), "normal" (N(0, 0.02²), as He et al. 2022) or
            "zero". Zero keys and values are not a no-op: they take softmax mass from the tokens.
        frozen_tokens: how many of the first tokens stay as they were initialised; 1 keeps an attention sink.
    """

    in_context: ClassVar[bool] = True

    length: int
    init: Init = "text"
    frozen_tokens: int = 0

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        states = start.key_values(sites, self.length, self.init)
        return None, {site: KeyValueParameters(*states[site], self.frozen_tokens) for site in sites}


class KeyValueParameters(nn.Module):
    """key (G, l, D_k) and value (G, l, D_v); the first `frozen_tokens` of the l are buffers."""

    def __init__(self, key: Tensor, value: Tensor, frozen_tokens: int = 0) -> None:
        super().__init__()
        key, value = full_precision(key.detach()), full_precision(value.detach())
        self.key = nn.Parameter(key[:, frozen_tokens:].clone())
        self.value = nn.Parameter(value[:, frozen_tokens:].clone())
        self.frozen_tokens = frozen_tokens
        if frozen_tokens:
            self.register_buffer("frozen_key", key[:, :frozen_tokens].clone())
            self.register_buffer("frozen_value", value[:, :frozen_tokens].clone())

    def forward(self, site: Site, shared: Any) -> KeyValue:
        if not self.frozen_tokens:
            return self.key, self.value
        return torch.cat([self.frozen_key, self.key], dim=1), torch.cat([self.frozen_value, self.value], dim=1)
