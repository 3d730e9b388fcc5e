"""UniPELT: prefix, adapter and LoRA behind gates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from peft import LoraConfig
from torch import Tensor, nn

from ..attention.readers import Plan
from ..model.block_slot import Reading
from ..model.frames import current
from ..model.layout import Layout, Site
from ..model.part import Part
from ..model.peft_part import PeftPart
from ..model.projections import linears_of
from ..model.slot import Prefix, Reader
from ..sources.text import Start
from ..space import Count, Method, in_proportion, register, require_choice, require_positive
from .adapter import SequentialAdapter
from .bottleneck import PostNormTerm, SequentialTerm
from .gate import PromptGate
from .prefix_tuning import PrefixTuning


@register
@dataclass(frozen=True)
class UniPELT(Method):
    """Prefix tuning, a sequential adapter and LoRA at once, each behind a gate that an example's prompt opens.

        γ = mean_t σ(x_t w + b);  P_k, P_v ← γ·(P_k, P_v);  h ← h + γ·A(h);  y = x W + γ·(x Aᵀ Bᵀ)

    A gate a layer and a part (queries and values of LoRA have one each), computed from the prompt without its padding
    and held while the answer is generated. In training the prompt ends where the labels begin, or where
    `foreword.known_prompt` says; a decoder refuses to learn without either, since the gates would see the answer.
    Elsewhere all tokens that the model is given are the prompt. γ takes the place of LoRA's α/r. A closed gate does
    not remove the prefix: K = V = 0 still takes softmax mass. The gates start near ½, so step 0 is not the base. The
    prefix starts from a text as `prefix-tuning`'s does (the authors': from N(0, 0.02²)). Every part is stored; LoRA
    can't be folded behind a gate.

    Use it as a baseline for compositions.

    Args:
        length: l, prefix tokens.
        reparam: of the prefix: "shared" (the paper's), "per-layer" or None for free parameters.
        hidden: width of that reparameterisation.
        bottleneck: r of the adapter.
        r: rank of LoRA.
        targets: of LoRA, as in `lora`.
    """

    name: ClassVar[str] = "unipelt"
    learning_rate: ClassVar[float] = 1e-3
    citation: ClassVar[str] = (
        "Mao et al., UniPELT: A Unified Framework for Parameter-Efficient Language Model Tuning, ACL 2022"
    )
    size: ClassVar[str | None] = "bottleneck"

    length: int = 10
    reparam: Literal["shared", "per-layer"] | None = "shared"
    hidden: int = 512
    bottleneck: int = 48
    r: int = 8
    targets: str = "query+value"

    def __post_init__(self) -> None:
        require_positive(self, "length", "hidden", "bottleneck", "r")
        require_choice(self, reparam=(None, "shared", "per-layer"))

    def at_size(self, size: int) -> UniPELT:
        others = {name: in_proportion(getattr(self, name), size, self.bottleneck) for name in ("length", "hidden", "r")}
        return replace(self, bottleneck=size, **others)

    @property
    def prefix(self) -> PrefixTuning:
        return PrefixTuning(length=self.length, reparam=self.reparam, hidden=self.hidden)

    @property
    def adapter(self) -> SequentialAdapter:
        return SequentialAdapter(bottleneck=self.bottleneck)

    def parts(self, layout: Layout, start: Start) -> list[Part]:
        prefix = self.prefix.build(layout, start)
        for site, module in prefix.modules.items():
            prefix.modules[site] = GatedPrefix(module, PromptGate(site.hidden_size, start))
        adapter = self.adapter.build(layout, start)
        for block, term in adapter.modules.items():
            gated = GatedPostNormTerm if isinstance(term, PostNormTerm) else GatedTerm
            adapter.modules[block] = gated(term, PromptGate(block.output_size, start))
        blocks = self._lora_blocks(layout)
        config = LoraConfig(r=self.r, lora_alpha=self.r, target_modules=[block.path for block in blocks])
        lora = GatedLora(self, None, {}, targets=blocks, config=config, seed=start.seed, mixes=True, start=start)
        return [
            Part(self, prefix.shared, prefix.modules, prefix.shift),
            Part(self, None, adapter.modules),
            lora,
        ]

    def count(self, layout: Layout) -> Count:
        """prefix-tuning + adapter + lora, and d + 1 for each gate."""
        blocks = self._lora_blocks(layout)
        low_rank = sum(self.r * (block.input_size + block.output_size) for block in blocks)
        adapters = self.adapter.blocks(layout)
        gates = [site.hidden_size for site in layout.select(None, "all")] + [block.output_size for block in adapters]
        gates += [block.input_size for block in blocks]
        rest = low_rank + sum(size + 1 for size in gates)
        return self.prefix.count(layout) + self.adapter.count(layout) + Count(rest, rest)

    def _lora_blocks(self, layout: Layout) -> list[Any]:
        """LoRA's layers: not those of cross-attention, which read the source where the gates read the target."""
        return linears_of(layout, self.targets, self.name, kinds=("self", "encoder"))


class GatedPrefix(Prefix):
    """A prefix whose keys and values are multiplied by the gate of each example."""

    reads_prompt = True

    def __init__(self, prefix: Prefix, gate: PromptGate) -> None:
        super().__init__(prefix.source, prefix.combine, prefix.dropout)
        self.gate = gate

    @property
    def reads_input(self) -> bool:
        return True

    def reader(self, site: Site, shared: Any, rows: Tensor | None, plan: Plan) -> Reader:
        plain = super().reader(site, shared, rows, plan)
        x = plan.call["hidden_states"]
        gate = self.gate(x if rows is None else x[rows], plan, rows)[..., None]  # (B, 1, 1, 1)
        return Reader(self, gate * plain.key, gate * plain.value, rows)


class GatedTerm(SequentialTerm):
    """h + γ·A(h)."""

    reads_prompt = True

    def __init__(self, term: SequentialTerm, gate: PromptGate) -> None:
        super().__init__(term.adapter)
        self.gate = gate

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        return h + self.gate(h, reading.plan, reading.rows) * self.adapter(h)


class GatedPostNormTerm(PostNormTerm):
    """LN(s + γ·A(LN(s)))."""

    reads_prompt = True

    def __init__(self, term: PostNormTerm, gate: PromptGate) -> None:
        super().__init__(term.adapter, term.norm)
        self.gate = gate

    def enter(self, x: Tensor, reading: Reading) -> Tensor:
        normalised = self.norm.forward(x)
        return x + self.gate(normalised, reading.plan, reading.rows) * self.adapter(normalised)


@dataclass
class GatedLora(PeftPart):
    """PEFT's LoRA with α/r = 1, whose low-rank term is multiplied by the gate of each example."""

    start: Start | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reads_prompt = True

    def install(self, host: Any, name: str, index: int, dtype: torch.dtype) -> None:
        super().install(host, name, index, dtype)
        host.watch_prompt()
        for block, layer in self.layers.items():
            gate = PromptGate(block.input_size, self.start).to(block.device, dtype)
            layer.foreword_gate = gate  # goes with the layer's device and, in the end, with the layer
            self.modules[block].gate = gate
            hooks = _GateHooks(self, layer)
            self._handles += [
                layer.register_forward_pre_hook(hooks.keep),
                layer.lora_B[self.key].register_forward_hook(hooks.multiply),
            ]


@dataclass(eq=False)
class _GateHooks:
    """Keep what enters a layer of PEFT's, and multiply its low-rank term by the gate."""

    part: GatedLora
    layer: nn.Module

    def keep(self, layer: nn.Module, args: tuple) -> None:
        frame = current()
        if frame is not None:
            frame.inputs[self] = args[0]

    def multiply(self, low_rank: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        frame = current()
        if frame is None:
            return None
        x, rows = frame.inputs.pop(self), frame.plan.rows[self.part.name]
        return output * self.layer.foreword_gate(x if rows is None else x[rows], frame.plan, rows).to(output.dtype)
