"""LLaMA-Adapter V2: bias, scale and norms, with prompts in the first layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import ForewordError
from ..model.block_slot import Reading, Term, bare_copy
from ..model.layout import Block, Layout
from ..model.part import Part
from ..model.weights import require_loaded
from ..sources.text import Start
from ..space import Count, Method, register, require_choice
from .zero_init import ZeroInit


@register
@dataclass(frozen=True)
class LlamaAdapterV2(Method):
    """A bias and a scale on every linear layer, trained norms, and zero-init prompts in the first layers.

        y = s ⊙ (x W + b),  s = 1, b = 0 at the start;  every norm's parameters;  zero-init(length = l) in `early`
        layers

    The paper scales outputs; its released 65B code scales inputs, y = (s ⊙ x) W + b. The linear layers are those of
    the attention and feed-forward sublayers. Only the prompts of the early fusion are here: what the paper reads
    there from an image encoder is learned. Nothing of the base changes: the norms are copies. Trainable and stored: Σ
    2·d_out + d·(2·L + 1) + l·d + H.

    Use it where little may change in many places; all but the prompts can be folded into the weights.

    Args:
        scaling: "output" (the paper) or "input" (the released 65B code).
        norms: train the norms.
        length: l, prompt tokens; 0 for no prompts.
        early: how many of the lowest attention layers read the prompts.
        head: a bias and a scale on the output head too, as LitGPT has them.
    """

    name: ClassVar[str] = "llama-adapter-v2"
    learning_rate: ClassVar[float] = 1e-2
    citation: ClassVar[str] = "Gao et al., LLaMA-Adapter V2: Parameter-Efficient Visual Instruction Model, 2023"

    scaling: Literal["output", "input"] = "output"
    norms: bool = True
    length: int = 20
    early: int = 1
    head: bool = False

    def __post_init__(self) -> None:
        require_choice(self, scaling=("output", "input"))
        if self.length < 0 or self.early < 1:
            raise ForewordError("LlamaAdapterV2: length must be at least 0 and early at least 1")

    def parts(self, layout: Layout, start: Start) -> list[Part]:
        modules: dict[Block, nn.Module] = {}
        for block in self._linears(layout):
            modules[block] = LinearTerm(block.input_size, block.output_size, self.scaling)
        if self.norms:
            require_loaded(self.name, [p for block in layout.norms for p in block.module.parameters(recurse=False)])
        for block in layout.norms if self.norms else []:
            modules[block] = NormTerm(bare_copy(block.module))
        prompts = self._prompts(layout)
        return [Part(self, None, modules), *([] if prompts is None else prompts.parts(layout, start))]

    def count(self, layout: Layout) -> Count:
        linears = self._linears(layout)
        total = sum(block.output_size + getattr(block, f"{self.scaling}_size") for block in linears)
        if self.norms:
            total += sum(p.numel() for block in layout.norms for p in block.module.parameters(recurse=False))
        prompts = self._prompts(layout)
        return Count(total, total) + (Count(0, 0) if prompts is None else prompts.count(layout))

    def _linears(self, layout: Layout) -> list[Block]:
        sparse = [ffn for ffn in layout.ffns if not ffn.dense]
        if sparse:
            raise ForewordError(
                f"llama-adapter-v2 can't reach every matrix of {type(sparse[0].module).__name__} in layer "
                f"{sparse[0].layer}: its experts are no linear layers"
            )
        if self.head and layout.head is None:
            raise ForewordError(f"llama-adapter-v2: {type(layout.model).__name__} has no output head")
        return [*layout.linears, layout.head] if self.head else layout.linears

    def _prompts(self, layout: Layout) -> ZeroInit | None:
        if self.length == 0:
            return None
        lowest = [site.layer for site in layout.select(None, "self")[: self.early]]
        return ZeroInit(length=self.length, layers=tuple(lowest))


class LinearTerm(Term):
    """s ⊙ (h + b), or the layer's own (s ⊙ x) W + b."""

    order: ClassVar[int] = 0
    exclusive: ClassVar[bool] = True

    def __init__(self, input_size: int, output_size: int, scaling: str) -> None:
        super().__init__()
        self.scaling = scaling
        self.scale = nn.Parameter(torch.ones(input_size if scaling == "input" else output_size))
        self.bias = nn.Parameter(torch.zeros(output_size))

    def enter(self, x: Tensor, reading: Reading) -> Tensor:
        return self.scale.to(x.dtype) * x if self.scaling == "input" else x

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        h = h + self.bias.to(h.dtype)
        return self.scale.to(h.dtype) * h if self.scaling == "output" else h


class NormTerm(Term):
    """A copy of the norm with parameters of its own, in the norm's place."""

    order: ClassVar[int] = 0
    exclusive: ClassVar[bool] = True

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm.requires_grad_(True)

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        dtype = next(self.norm.parameters()).dtype
        return self.norm(x.to(dtype)).to(h.dtype)
