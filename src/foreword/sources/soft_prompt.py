"""Keys and values that the frozen model itself computes for a soft prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..attention.merge import full_precision
from ..attention.readers import KeyValue, Recorder
from ..errors import ForewordError
from ..model.layout import Site
from .shared import Shared
from .text import Start, prefix_positions


@dataclass(frozen=True)
class SoftPrompt:
    """X⁰ = [P; Emb(ids)] with P (l, d) (Lester et al. 2021).

    A causal model computes the rows of P without seeing the text, and the text reads them through their keys and values
    alone. So one forward of P gives a KV prefix that equals putting P in front of every row, without its rows in every
    sequence, its entries in the KV cache, or a longer mask.

    Trainable: l·d, once.

    Args:
        length: l, prompt tokens.
        init: "text" (embeddings of real tokens) or "normal" (N(0, 0.02²)).
    """

    in_context: ClassVar[bool] = True

    length: int
    init: Literal["text", "normal"] = "text"

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]:
        layout = start.layout
        if not layout.decoder_only:
            raise ForewordError(
                f"prompt-tuning needs a causal language model; in {type(start.model).__name__} the prompt would read "
                "the text. Use prefix-tuning or deep-prompt"
            )
        if layout.stateful:
            raise ForewordError(
                f"prompt-tuning can't steer {type(start.model).__name__}: some of its layers would read the prompt "
                "through a recurrent state. Use prefix-tuning"
            )
        stack = layout.stacks[0]
        if self.init == "text":
            embedding = stack.get_input_embeddings()
            with torch.no_grad():
                rows = embedding(start.ids(self.length).to(embedding.weight.device))[0]
        else:
            rows = start.normal(self.length, sites[0].hidden_size, std=0.02)
        return PromptForward(rows, stack, sites, prefix_positions(layout, self.length)), {
            site: Shared() for site in sites
        }


class PromptForward(nn.Module):
    """P (l, d) through the whole frozen stack: site label → the keys and values of P there."""

    def __init__(self, rows: Tensor, stack: PreTrainedModel, sites: list[Site], positions: Tensor | None) -> None:
        super().__init__()
        self.rows = nn.Parameter(full_precision(rows.detach()).clone())
        self.register_buffer("positions", torch.arange(len(rows)) if positions is None else positions, persistent=False)
        self._frozen = (stack, sites)  # a tuple, so that the model is not registered as a child of its own adapter

    def forward(self) -> dict[str, KeyValue]:
        stack, sites = self._frozen
        if torch.is_grad_enabled() and isinstance(sites[0].layer_module, FSDPModule):
            raise ForewordError(
                "prompt-tuning can't train under FSDP2, which frees a layer's weights between its runs of the prompt "
                "and of the text; use DDP, or prefix-tuning"
            )
        recorder = Recorder()
        stack(
            inputs_embeds=self.rows[None].to(stack.dtype),
            position_ids=self.positions[None],
            use_cache=False,
            foreword=recorder,
        )
        return {site.label: tuple(state[0] for state in recorder.calls[site.module][1:]) for site in sites}
