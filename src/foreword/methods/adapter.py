"""The sequential adapter, at the places of Houlsby et al. and Pfeiffer et al."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..errors import ForewordError
from ..model.layout import Block, Layout
from ..model.part import Part
from ..sources.text import Start
from ..space import Count, Layers, Method, register, require_choice, require_positive
from .bottleneck import (
    ACTIVATIONS,
    Activation,
    Bottleneck,
    Init,
    Norm,
    PostNormTerm,
    ResidualTerm,
    SequentialTerm,
    num_weights,
    require_scale,
)


@register
@dataclass(frozen=True)
class SequentialAdapter(Method):
    """A bottleneck behind a frozen sublayer, which reads what the sublayer gives.

        h ← h + ReLU(h W_d + b_d) W_u + b_u,  W_d (d, r), W_u (r, d)

    Houlsby et al. put one behind the attention and one behind the FFN of each layer, before the residual sum;
    Pfeiffer et al. only the one behind the FFN, which in a post-norm model reads the normalised residual sum s: s ← s
    + A(LN(s)), and LN once more. The `adapters` library has s ← s + A(s) in a pre-norm model. Trainable and stored:
    2·r·d + r + d an adapter.

    Use it as the classical baseline. He et al. 2022 find a parallel adapter better at equal size; on this project's
    demo task it was not (docs/learning-rates.md).

    Args:
        bottleneck: r.
        site: "pfeiffer", "houlsby", or "attention" or "ffn" for one of the two places of Houlsby et al.
        reads: for the site "pfeiffer" in a pre-norm model, "sublayer" reads h, "residual" the residual sum s.
        scale: s on the adapter's output, a number or "learned".
        norm: a trainable layer norm on h ("in"), on the result ("out"), or "none".
        init: "bert" starts with N(0, 0.02²), near the unchanged model; "lora" with W_u = 0, from the unchanged model.
        bias: with b_d and b_u.
        activation: "relu", "gelu", "silu" or "tanh".
        dropout: on the bottleneck, in training.
        layers: None for every layer, n for the top n, or a list of layer numbers.
        attention: which attention has an adapter behind it: "all", or some of "self", "cross", "encoder" joined by "+".
    """

    name: ClassVar[str] = "adapter"
    learning_rate: ClassVar[float] = 3e-3
    citation: ClassVar[str] = (
        "Houlsby et al., Parameter-Efficient Transfer Learning for NLP, ICML 2019; "
        "Pfeiffer et al., AdapterFusion: Non-Destructive Task Composition for Transfer Learning, EACL 2021"
    )
    size: ClassVar[str | None] = "bottleneck"

    bottleneck: int = 64
    site: Literal["pfeiffer", "houlsby", "attention", "ffn"] = "pfeiffer"
    reads: Literal["sublayer", "residual"] = "sublayer"
    scale: float | Literal["learned"] = 1.0
    norm: Norm = "none"
    init: Init = "bert"
    bias: bool = True
    activation: Activation = "relu"
    dropout: float = 0.0
    layers: Layers = None
    attention: str = "all"

    def __post_init__(self) -> None:
        require_positive(self, "bottleneck")
        require_choice(self, site=("pfeiffer", "houlsby", "attention", "ffn"))
        require_choice(self, norm=("none", "in", "out"), init=("lora", "bert"), activation=tuple(ACTIVATIONS))
        require_choice(self, reads=("sublayer", "residual"))
        require_scale(self)

    def build(self, layout: Layout, start: Start) -> Part:
        return Part(self, None, {block: self._term(block, start) for block in self.blocks(layout)})

    def _term(self, block: Block, start: Start) -> SequentialTerm:
        adapter = Bottleneck(
            block.output_size,
            block.output_size,
            self.bottleneck,
            start,
            scale=self.scale,
            norm=self.norm,
            init=self.init,
            bias=self.bias,
            dropout=self.dropout,
            activation=self.activation,
        )
        if block.kind.endswith("norm"):
            return PostNormTerm(adapter, block.module)
        return ResidualTerm(adapter) if block.kind.endswith("residual") else SequentialTerm(adapter)

    def count(self, layout: Layout) -> Count:
        """2·r·d, plus r + d for biases, 2·d for a norm, 1 for a learned scale, for each adapter."""
        total = sum(
            num_weights(self.bottleneck, block.output_size, block.output_size, self.bias, self.norm)
            + (self.scale == "learned")
            for block in self.blocks(layout)
        )
        return Count(total, total)

    def blocks(self, layout: Layout) -> list[Block]:
        """The blocks that have an adapter behind them."""
        blocks: list[Block] = []
        if self.site in ("houlsby", "attention"):
            blocks += [site.output for site in layout.select(self.layers, self.attention)]
        if self.site != "attention":
            ffns = layout.select_ffns(self.layers)
            if not ffns:
                raise ForewordError("adapter: no layer of this model has a feed-forward sublayer")
            blocks += [self._behind(ffn) for ffn in ffns]
        return blocks

    def _behind(self, ffn: Block) -> Block:
        """The block behind which the adapter of a feed-forward sublayer stands."""
        if self.site != "pfeiffer":
            return ffn
        return ffn.post_norm or (ffn.on_residual if self.reads == "residual" else ffn)
