"""Prompts that a small network makes from codes, then the frozen projections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..attention.readers import KeyValue
from ..model.layout import Site
from .projected import Prompt, project_prompt
from .text import Start


@dataclass(frozen=True)
class NonLinear:
    """p_i = MLP(e_i), K = p_i W_k, V = p_i W_v: one MLP for all layers ("On Zero-Initialized Attention", ICML 2025).

    `hypermodel` (the published setting): a code of 64 numbers for each of the model's N layers → 64 ReLU → the whole
    prompt.
    Trainable: N·64 + (64·h + h) + (h·l·d + l·d). Its output starts near 0 (U(±10⁻³·√(3/(h·d))), hyper-fan-in).
    `deepshare`: a code of 256 numbers for each prompt token → h ReLU → that token.
    Trainable: L·l·256 + (256·h + h) + (h·d + d).

    Args:
        length: l, prompt tokens.
        form: "hypermodel" or "deepshare".
        hidden: h, width of the MLP.
    """

    in_context: ClassVar[bool] = False

    length: int
    form: Literal["hypermodel", "deepshare"] = "hypermodel"
    hidden: int = 64

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        network = {"hypermodel": Hypermodel, "deepshare": DeepShare}[self.form]
        return network(self.length, self.hidden, sites, start), {site: Generated() for site in sites}


class Hypermodel(nn.Module):
    """vec(p_i) = ReLU(e_i U + c) W + b; rows of the codes belong to layers, the adapted ones are used."""

    CODE = 64

    def __init__(self, length: int, hidden: int, sites: list[Site], start: Start) -> None:
        super().__init__()
        self.length = length
        self.labels = [site.label for site in sites]
        every = [site for kind in dict.fromkeys(s.kind for s in sites) for site in start.layout.kinds[kind]]
        self.rows = [every.index(site) for site in sites]
        width = sites[0].hidden_size
        self.codes = nn.Parameter(start.normal(len(every), self.CODE))
        self.down = start.linear(self.CODE, hidden)
        self.up = start.linear(hidden, length * width)
        bound = 1e-3 * math.sqrt(3 / (hidden * width))
        nn.init.uniform_(self.up.weight, -bound, bound, generator=start.generator)
        nn.init.zeros_(self.up.bias)

    def forward(self) -> dict[str, Tensor]:
        prompts = self.up(torch.relu(self.down(self.codes[self.rows])))  # (L_a, l·d)
        return dict(zip(self.labels, prompts.unflatten(1, (self.length, -1)), strict=True))


class DeepShare(nn.Module):
    """p_{i,j} = ReLU(e_{i,j} U + c) W + b for token j of layer i."""

    CODE = 256

    def __init__(self, length: int, hidden: int, sites: list[Site], start: Start) -> None:
        super().__init__()
        self.labels = [site.label for site in sites]
        self.codes = nn.Parameter(start.normal(len(sites), length, self.CODE))
        self.down = start.linear(self.CODE, hidden)
        self.up = start.linear(hidden, sites[0].hidden_size)

    def forward(self) -> dict[str, Tensor]:
        return dict(zip(self.labels, self.up(torch.relu(self.down(self.codes))), strict=True))


class Generated(nn.Module):
    """This site's prompt among the generated ones, through the frozen projections."""

    def forward(self, site: Site, shared: dict[str, Tensor]) -> KeyValue:
        return project_prompt(site, shared[site.label])

    def fold(self, site: Site, shared: dict[str, Tensor]) -> nn.Module:
        return Prompt(shared[site.label])
