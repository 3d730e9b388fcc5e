"""The two matrices of an adapter as keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from ..model.layout import Site
from .direct import KeyValueParameters
from .text import NORMAL_STD, Start


@dataclass(frozen=True)
class HeadBottleneck:
    """K = W_dᵀ, V = W_u: free matrices W_d (D, r), W_u (r, D_v) of each head, for `Activation`.

    Trainable: Σ_layers H·r·(D + D_v) = 2·L·r·d, or G instead of H with heads="key-value".

    Args:
        length: r, the bottleneck.
        init: "lora" (W_d Kaiming-uniform, U(±1/√D); W_u zero) or "normal" (both N(0, 0.02²)).
        heads: "query" for matrices of each query head, "key-value" for those of each group of heads that share keys.
    """

    in_context: ClassVar[bool] = False

    length: int
    init: Literal["lora", "normal"] = "lora"
    heads: Literal["query", "key-value"] = "query"

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        return None, {site: self._matrices(site, start) for site in sites}

    def _matrices(self, site: Site, start: Start) -> nn.Module:
        heads = site.num_heads if self.heads == "query" else site.num_key_value_heads
        down = start.normal(heads, self.length, site.key_dim, std=NORMAL_STD)
        up = start.normal(heads, self.length, site.value_dim, std=NORMAL_STD)
        if self.init == "lora":
            bound = site.key_dim**-0.5
            down, up = down.uniform_(-bound, bound, generator=start.generator), torch.zeros_like(up)
        return KeyValueParameters(down, up)
