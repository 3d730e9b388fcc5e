"""A prefix for each of several parallel streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..attention.merge import full_precision
from ..attention.readers import KeyValue
from ..model.layout import Site
from .text import Start


@dataclass(frozen=True)
class PerStream:
    """K_p^i, V_p^i for stream p at layer i: parameters (P, G, l, D), or a code of each stream and an MLP of each layer,

        [K_p^i; V_p^i] = W_2^i tanh(W_1^i c_p^i + b_1^i) + b_2^i,  c_p^i ∈ R^128,

    which `fold` evaluates once. A row of the batch reads the prefix of its stream. Both start at the keys and values of
    real tokens, another piece of the text for each stream.

    Trainable: Σ_layers P·l·G·(D_k + D_v), or Σ_layers P·128 + (128 + 1)·m + (m + 1)·l·G·(D_k + D_v).

    Args:
        streams: P.
        length: l, prefix tokens of a stream.
        init: "text" (the model's own keys and values for real tokens) or "normal": N(0, 0.02²), with an MLP PyTorch's
            initialisation.
        hidden: m, width of the MLP; None for free parameters.
    """

    in_context: ClassVar[bool] = True

    streams: int
    length: int
    init: Literal["text", "normal"] = "text"
    hidden: int | None = None

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        if self.hidden is not None and self.init == "normal":
            return None, {site: StreamMlp(self, site, start) for site in sites}
        starts = start.split(self.streams, self.length) if self.init == "text" else [start] * self.streams
        states = [one.key_values(sites, self.length, self.init) for one in starts]  # of each stream
        modules: dict[Site, nn.Module] = {}
        for site in sites:
            key, value = (torch.stack([pair[site][part] for pair in states]) for part in (0, 1))
            modules[site] = StreamParameters(key, value)
            if self.hidden is not None:
                modules[site] = StreamMlp(self, site, start).fit(key, value)
        return None, modules


class StreamParameters(nn.Module):
    """key (P, G, l, D_k) and value (P, G, l, D_v)."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.key = nn.Parameter(full_precision(key.detach()).clone())
        self.value = nn.Parameter(full_precision(value.detach()).clone())

    def forward(self, site: Site, stream: Tensor) -> KeyValue:
        """Keys (R, G, l, D_k) and values (R, G, l, D_v) of R rows that read the streams `stream` (R,)."""
        return self.key[stream], self.value[stream]

    def every(self) -> KeyValue:
        """Keys (P, G, l, D_k) and values (P, G, l, D_v) of all streams."""
        return self.key, self.value

    @torch.no_grad()
    def fit(self, key: Tensor, value: Tensor) -> StreamParameters:
        """Take these keys and values."""
        self.key.copy_(key)
        self.value.copy_(value)
        return self


class StreamMlp(nn.Module):
    """A code for each stream → tanh MLP → its keys and values at one layer."""

    CODE = 128

    def __init__(self, source: PerStream, site: Site, start: Start) -> None:
        super().__init__()
        assert source.hidden is not None
        self.shapes = [(site.num_key_value_heads, source.length, dim) for dim in (site.key_dim, site.value_dim)]
        self.sizes = [heads * length * dim for heads, length, dim in self.shapes]
        self.codes = nn.Parameter(start.normal(source.streams, self.CODE))
        self.down = start.linear(self.CODE, source.hidden)
        self.up = start.linear(source.hidden, sum(self.sizes))

    def forward(self, site: Site, stream: Tensor) -> KeyValue:
        key, value = self.every()
        return key[stream], value[stream]

    def every(self) -> KeyValue:
        """Keys (P, G, l, D_k) and values (P, G, l, D_v) of all streams."""
        flat = self.up(torch.tanh(self.down(self.codes)))
        key, value = (
            x.unflatten(1, shape) for x, shape in zip(flat.split(self.sizes, dim=1), self.shapes, strict=True)
        )
        return key, value

    @torch.no_grad()
    def fit(self, key: Tensor, value: Tensor) -> StreamMlp:
        """Set W_2 to the least-squares solution, of least norm, for key and value (exact where P ≤ m), and b_2 to 0."""
        targets = torch.cat([key.flatten(1), value.flatten(1)], dim=1).double()  # (P, l·G·(D_k + D_v))
        features = torch.tanh(self.down(self.codes)).double().to(targets.device)  # (P, m)
        self.up.weight.copy_((torch.linalg.pinv(features) @ targets).T)
        self.up.bias.zero_()
        return self

    def fold(self, site: Site, shared: None) -> nn.Module:
        return StreamParameters(*self.every())
