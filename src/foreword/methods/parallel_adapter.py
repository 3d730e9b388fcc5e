"""The parallel adapter, scaled or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..errors import ForewordError
from ..model.layout import Block, Layout, Site
from ..model.part import Part
from ..sources.text import Start
from ..space import Count, Layers, Method, register, require_choice, require_positive
from .bottleneck import (
    ACTIVATIONS,
    Activation,
    Bottleneck,
    HeadTerm,
    Init,
    Norm,
    ParallelTerm,
    num_weights,
    require_scale,
)

UNIFIED_VIEW = "He et al., Towards a Unified View of Parameter-Efficient Transfer Learning, ICLR 2022"


@register
@dataclass(frozen=True)
class ParallelAdapter(Method):
    """A bottleneck beside a frozen sublayer, which reads what the sublayer reads.

        h ← h + s · ReLU(x W_d) W_u,  W_d (d, r), W_u (r, d)

    At the FFN, x is the (normalised) input of the FFN and h its output, before the residual sum. At the attention, x
    is the input of the attention and the term is added to the concatenated heads before W_o, as a prefix's is. A
    dropout of the model's own behind the sublayer (BART, GPT-2) drops from the sum. Trainable and stored: 2·r·d a
    sublayer.

    Use it where a few per cent of the model's parameters may be spent; at equal size He et al. (Table 4) found the FFN
    the strongest site.

    Args:
        bottleneck: r.
        site: "ffn" or "attention".
        scale: s, a number or "learned"; 4 for summarisation and translation with r = 512, 2 for GLUE.
        reads: for the FFN site, "normalised" reads what the FFN reads; "residual" reads the residual stream in front of
            a pre-norm model's norm, as the `adapters` library does.
        output: for the attention site, "heads" adds before W_o, "projected" after it.
        norm: a trainable layer norm on x ("in"), on the scaled result ("out"), or "none".
        init: "lora" starts with W_u = 0, from the unchanged model; "bert" with N(0, 0.02²).
        bias: with biases, as in the released code; the paper has and counts none.
        activation: "relu", "gelu", "silu" or "tanh".
        dropout: on the bottleneck, in training.
        layers: None for every layer, n for the top n, or a list of layer numbers.
        attention: for the attention site, "all", or some of "self", "cross", "encoder" joined by "+".
    """

    name: ClassVar[str] = "parallel-adapter"
    learning_rate: ClassVar[float] = 1e-2
    citation: ClassVar[str] = UNIFIED_VIEW
    size: ClassVar[str | None] = "bottleneck"

    bottleneck: int = 64
    site: Literal["ffn", "attention"] = "ffn"
    scale: float | Literal["learned"] = 4.0
    reads: Literal["normalised", "residual"] = "normalised"
    output: Literal["heads", "projected"] = "heads"
    norm: Norm = "none"
    init: Init = "lora"
    bias: bool = False
    activation: Activation = "relu"
    dropout: float = 0.0
    layers: Layers = None
    attention: str = "all"

    def __post_init__(self) -> None:
        require_positive(self, "bottleneck")
        require_choice(self, site=("ffn", "attention"), output=("heads", "projected"))
        require_choice(self, norm=("none", "in", "out"), init=("lora", "bert"), activation=tuple(ACTIVATIONS))
        require_choice(self, reads=("normalised", "residual"))
        require_scale(self)

    def build(self, layout: Layout, start: Start) -> Part:
        modules = {}
        for place, width in self._places(layout):
            adapter = Bottleneck(
                place.hidden_size if isinstance(place, Site) else place.input_size,
                width,
                self.bottleneck,
                start,
                scale=self.scale,
                norm=self.norm,
                init=self.init,
                bias=self.bias,
                dropout=self.dropout,
                activation=self.activation,
            )
            modules[place] = HeadTerm(adapter) if isinstance(place, Site) else ParallelTerm(adapter)
        return Part(self, None, modules)

    def count(self, layout: Layout) -> Count:
        """Σ r·(d_in + d_out), plus r + d_out for biases, 2·d for a norm, 1 for a learned scale."""
        total = 0
        for place, width in self._places(layout):
            read = place.hidden_size if isinstance(place, Site) else place.input_size
            total += num_weights(self.bottleneck, read, width, self.bias, self.norm) + (self.scale == "learned")
        return Count(total, total)

    def _places(self, layout: Layout) -> list[tuple[Site | Block, int]]:
        """Where the adapters go, and the width of what each adds to."""
        if self.site == "ffn":
            ffns = layout.select_ffns(self.layers)
            if not ffns:
                raise ForewordError("parallel-adapter: no layer of this model has a feed-forward sublayer")
            return [(ffn.on_residual if self.reads == "residual" else ffn, ffn.output_size) for ffn in ffns]
        sites = layout.select(self.layers, self.attention)
        if self.output == "heads":
            return [(site, site.num_heads * site.value_dim) for site in sites]
        return [(site.output, site.output.output_size) for site in sites]

    def blocks(self, layout: Layout) -> list[Block]:
        """The blocks that have an adapter beside them; those at the attention that add before W_o are at sites."""
        return [place for place, _ in self._places(layout) if isinstance(place, Block)]
