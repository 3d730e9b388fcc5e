"""Keys and values that are computed once for all sites."""

from __future__ import annotations

from torch import nn

from ..attention.readers import KeyValue
from ..model.layout import Site


class Shared(nn.Module):
    """This site's share of what the adapter computed once for the forward: site label → keys and values."""

    def forward(self, site: Site, shared: dict[str, KeyValue]) -> KeyValue:
        return shared[site.label]
