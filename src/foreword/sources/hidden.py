"""Keys and values from hidden states, read as the layer reads its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention.merge import full_precision
from ..attention.readers import KeyValue
from ..errors import ForewordError
from ..model.layout import Site
from .text import Start, prefix_positions


@dataclass(frozen=True)
class Hidden:
    """K = R_{j−l}(W_k LN(p_j)), V = W_v LN(p_j): rows p^i (l, d) put in front of the layer's input.

    Only the text rows go on to the next layer, where fresh rows p^{i+1} stand in front of them: H^{i+1} = [p^{i+1};
    H̄^{i+1}]. Prefix rows therefore act through their keys and values alone, and no output is computed for them.

    Trainable: Σ_layers l·d.

    Args:
        length: l, rows.
        init: "text" (hidden states of real tokens at that layer) or "normal" (N(0, 0.02²)).
    """

    in_context: ClassVar[bool] = True

    length: int
    init: str = "text"

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        for site in sites:
            if not site.reads_layer_input:
                raise ForewordError(
                    f"deep-prompt can't follow what {type(site.module).__name__} in layer {site.layer} reads: its "
                    "input is neither the layer's input nor one norm of it"
                )
        rows = start.hidden_states(sites, self.length) if self.init == "text" else None
        return None, {
            site: HiddenRows(
                rows[site] if rows is not None else start.normal(self.length, site.hidden_size, std=0.02),
                prefix_positions(start.layout, self.length),
            )
            for site in sites
        }


class HiddenRows(nn.Module):
    """Rows p (l, d) through the layer's norm, frozen projections and rotary embedding."""

    def __init__(self, rows: Tensor, positions: Tensor | None) -> None:
        super().__init__()
        self.rows = nn.Parameter(full_precision(rows.detach()).clone())
        self.register_buffer("positions", torch.arange(len(rows)) if positions is None else positions, persistent=False)

    def forward(self, site: Site, shared: Any) -> KeyValue:
        return site.project(self.rows, self.positions, norm=True)
