"""Keys and values through an embedding and a tanh MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ..attention.readers import KeyValue
from ..model.layout import Site
from .direct import Init, KeyValueParameters
from .shared import Shared
from .text import Start


@dataclass(frozen=True)
class Mlp:
    """[K_1; V_1; …; K_L; V_L] = tanh(E W_1 + b_1) W_2 + b_2 with E (l, d) (Li & Liang 2021, §4.3).

    One map for all layers of a kind of attention (self, cross, encoder), as in the papers' code, or one for each
    layer. It is a training device: `fold` evaluates it once and keeps the keys and values.

    Trainable for a shared map: l·d + (d·m + m) + (m + 1)·Σ_layers G·(D_k + D_v).

    Args:
        length: l, prefix tokens.
        hidden: m, width of the MLP.
        per_layer: a map for each layer.
        init: "text" solves W_2 by least squares so that the map starts at the keys and values of real tokens (exactly,
            for l ≤ m); "normal" leaves PyTorch's initialisation, as the papers' code does.
        heads: "key-value" for keys and values of each key/value head, "query" for those of each query head.
    """

    in_context: ClassVar[bool] = True

    length: int
    hidden: int = 512
    per_layer: bool = False
    init: Init = "text"
    heads: Literal["key-value", "query"] = "key-value"

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        states = start.key_values(sites, self.length, "text") if self.init == "text" else None
        if states is not None and self.heads == "query":
            states = {s: tuple(t.repeat_interleave(s.num_heads // len(t), dim=0) for t in states[s]) for s in sites}
        if self.per_layer:
            return None, {site: OwnMlp(self._map([site], start, states)) for site in sites}
        kinds: dict[str, list[Site]] = {}
        for site in sites:
            kinds.setdefault(site.kind, []).append(site)
        maps = nn.ModuleDict({kind: self._map(members, start, states) for kind, members in kinds.items()})
        return SharedMlp(maps), {site: Reparameterized() for site in sites}

    def _map(self, sites: list[Site], start: Start, states: dict[Site, KeyValue] | None) -> Reparameterization:
        reparameterization = Reparameterization(self.length, self.hidden, sites, start, self.heads)
        if states is not None:
            reparameterization.fit([states[site] for site in sites])
        return reparameterization


class Reparameterization(nn.Module):
    """E (l, d) → tanh(E W_1 + b_1) W_2 + b_2 → keys (G, l, D_k) and values (G, l, D_v) of each of `sites`."""

    def __init__(self, length: int, hidden: int, sites: list[Site], start: Start, heads: str) -> None:
        super().__init__()
        self.labels = [site.label for site in sites]
        self.heads = [
            (s.num_heads if heads == "query" else s.num_key_value_heads, dim)
            for s in sites
            for dim in (s.key_dim, s.value_dim)
        ]
        self.sizes = [heads * dim for heads, dim in self.heads]
        width = sites[0].hidden_size
        self.embedding = nn.Parameter(start.normal(length, width))
        self.down = start.linear(width, hidden)
        self.up = start.linear(hidden, sum(self.sizes))

    def forward(self) -> dict[str, KeyValue]:
        flat = self.up(torch.tanh(self.down(self.embedding)))  # (l, Σ 2·G·D)
        pieces = [
            piece.view(len(flat), heads, dim).transpose(0, 1)  # (G, l, D)
            for piece, (heads, dim) in zip(flat.split(self.sizes, dim=-1), self.heads, strict=True)
        ]
        return {label: (pieces[2 * i], pieces[2 * i + 1]) for i, label in enumerate(self.labels)}

    @torch.no_grad()
    def fit(self, targets: list[KeyValue]) -> None:
        """Set W_2 to the least-squares solution, of least norm, of tanh(E W_1 + b_1) W_2 = targets, and b_2 to 0."""
        flat = torch.cat([t.transpose(0, 1).flatten(1) for pair in targets for t in pair], dim=1)  # (l, Σ 2·G·D)
        features = torch.tanh(self.down(self.embedding)).double()  # (l, m)
        solution = torch.linalg.pinv(features) @ flat.double().to(features.device)
        self.up.weight.copy_(solution.T)
        self.up.bias.zero_()


class SharedMlp(nn.Module):
    """The maps of all kinds of attention, evaluated once a forward: site label → keys and values."""

    def __init__(self, maps: nn.ModuleDict) -> None:
        super().__init__()
        self.maps = maps

    def forward(self) -> dict[str, KeyValue]:
        return {
            label: pair for reparameterization in self.maps.values() for label, pair in reparameterization().items()
        }


class Reparameterized(Shared):
    """The keys and values of this site, until they are folded."""

    def fold(self, site: Site, shared: dict[str, KeyValue]) -> nn.Module:
        return KeyValueParameters(*self(site, shared))


class OwnMlp(nn.Module):
    """A map of this site's own."""

    def __init__(self, reparameterization: Reparameterization) -> None:
        super().__init__()
        self.reparameterization = reparameterization

    def forward(self, site: Site, shared: Any) -> KeyValue:
        return self.reparameterization()[site.label]

    def fold(self, site: Site, shared: Any) -> nn.Module:
        return KeyValueParameters(*self(site, shared))
