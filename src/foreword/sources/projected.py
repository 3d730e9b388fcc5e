"""Keys and values from a prompt through the frozen projections, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention.merge import full_precision
from ..attention.readers import KeyValue
from ..model.layout import Site
from .text import Start


@dataclass(frozen=True)
class Projected:
    """K = p W_k, V = p W_v with p (l, d): no layer norm and no rotation (LLaMA-Adapter, Zhang et al. 2023).

    A model's QK-norm counts as part of its key projection.

    Trainable: Σ_layers l·d.

    Args:
        length: l, prompt tokens.
        std: of the initial N(0, std²); the released code has 1.
    """

    in_context: ClassVar[bool] = False

    length: int
    std: float = 1.0

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        return None, {site: Prompt(start.normal(self.length, site.hidden_size, std=self.std)) for site in sites}


class Prompt(nn.Module):
    """p (l, d) → keys (G, l, D_k) and values (G, l, D_v)."""

    def __init__(self, prompt: Tensor) -> None:
        super().__init__()
        self.prompt = nn.Parameter(full_precision(prompt.detach()).clone())

    def forward(self, site: Site, shared: Any) -> KeyValue:
        return project_prompt(site, self.prompt)


def project_prompt(site: Site, prompt: Tensor) -> KeyValue:
    """prompt (l, d) through the site's projections at position 0, where the rotation is the identity."""
    return site.project(prompt, torch.zeros(len(prompt), dtype=torch.long, device=prompt.device), norm=False)
