"""One set of parallel streams on a model: a prefix for each stream at every attention, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..aggregate import StreamAggregator
from .layout import Site
from .part import Part
from .slot import evict, slot_of
from .streams import set_name

if TYPE_CHECKING:
    from .host import Host


@dataclass
class StreamPart(Part):
    """P streams: their prefixes, in the slots of attention modules under a name of the set's own, and their aggregator.

    Attributes:
        streams: P; a set of one has no modules and is the base model.
        aggregator: (P, B, T, d) → (B, T, d).
    """

    streams: int = 1
    aggregator: StreamAggregator | None = None

    def install(self, host: Host, name: str, index: int, dtype: torch.dtype) -> None:
        host.add_set(name, self)
        if self.aggregator is not None:
            device = self.sites[-1].device  # of the last layer
            host.aggregators[set_name(name, self.streams)] = self.aggregator.to(device, dtype)
        for site in self.sites:
            self.modules[site].to(site.device, dtype)
            slot_of(site).place(set_name(name, self.streams), index, self.modules[site])

    def remove(self, host: Host, name: str) -> None:
        for site in self.sites:
            evict(site, set_name(name, self.streams))
        host.remove_set(name, self)

    def named_modules(self) -> dict[str, nn.Module]:
        aggregator = {} if self.aggregator is None else {"aggregator": self.aggregator}
        return super().named_modules() | aggregator

    def num_stored(self) -> int:
        aggregator = 0 if self.aggregator is None else sum(p.numel() for p in self.aggregator.parameters())
        return super().num_stored() + aggregator

    @property
    def sites(self) -> list[Site]:
        return [place for place in self.modules if isinstance(place, Site)]
