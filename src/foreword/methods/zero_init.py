"""Zero-initialised attention: LLaMA-Adapter, its non-linear prompts, and the random-init baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..combines import Joint, ZeroGate
from ..errors import ForewordError
from ..model.layout import Layout
from ..sources import NonLinear, Projected
from ..space import Count, Layers, Method, Point, register, require_choice, require_positive

_LLAMA_ADAPTER = (
    "Zhang et al., LLaMA-Adapter: Efficient Fine-tuning of Language Models with Zero-initialized Attention, ICLR 2024"
)


@register
@dataclass(frozen=True)
class ZeroInit(Method):
    """Prompts with a softmax of their own behind a gate that starts closed (LLaMA-Adapter).

        o_h = softmax(q_h Kᵀ/√D) V + tanh(g_h) · softmax(q_h (p W_k)ᵀ/√D) (p W_v),  g = 0 at the start

    The prompt passes through the frozen projections without norm or rotation; one gate a layer and query head. At
    step 0 the model is the base, bit for bit. Trainable and stored: L_a·(l·d + H) for L_a adapted layers.

    Use it where training must start from the unchanged model.

    Args:
        length: l, prompt tokens.
        layers: n for the top n layers, a list of layer numbers, "upper" for all but the lowest two (as 30
            of LLaMA-7B's 32), or None for every layer.
        attention: "self", or some of "self", "cross", "encoder" joined by "+", or "all".
        std: of the initial prompts N(0, std²); 1 in the released code.
        opening: the initial tanh(g); 0 is the method, others are controls.
    """

    name: ClassVar[str] = "zero-init"
    learning_rate: ClassVar[float] = 3e-2
    citation: ClassVar[str] = _LLAMA_ADAPTER
    size: ClassVar[str | None] = "length"

    length: int = 10
    layers: Layers = "upper"
    attention: str = "self"
    std: float = 1.0
    opening: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "length")
        if not 0 <= self.opening < 1:
            raise ForewordError(f"ZeroInit: opening must be at least 0 and below 1, not {self.opening}")

    def point(self) -> Point:
        return Point(Projected(self.length, self.std), ZeroGate(self.opening), self.layers, self.attention)

    def count(self, layout: Layout) -> Count:
        sites = layout.select(self.layers, self.attention)
        total = sum(self.length * site.hidden_size + site.num_heads for site in sites)
        return Count(total, total)


@register
@dataclass(frozen=True)
class ZeroInitNonlinear(Method):
    """Zero-init attention whose prompts come from one small network for all layers.

        p_i = ReLU(e_i U + c) W + b, then as zero-init

    Two forms of the released code: "hypermodel" (the published setting), a code of 64 numbers for each layer that
    becomes the whole prompt, and "deepshare", a code of 256 numbers for each prompt token. `fold` evaluates the
    network once and leaves linear prompts. Trainable (hypermodel): N·64 + 64·h + h + h·l·d + l·d + L_a·H; stored
    after folding: L_a·(l·d + H).

    Use it beside zero-init in comparisons; the network couples the layers.

    Args:
        length: l, prompt tokens.
        layers: n for the top n layers, a list of layer numbers, "upper" for all but the lowest two, or None for every
            layer.
        attention: "self", or some of "self", "cross", "encoder" joined by "+", or "all".
        form: "hypermodel" or "deepshare".
        hidden: h, width of the network.
    """

    name: ClassVar[str] = "zero-init-nonlinear"
    learning_rate: ClassVar[float] = 3e-2
    citation: ClassVar[str] = "On Zero-Initialized Attention: Optimal Prompt and Gating Factor Estimation, ICML 2025"
    size: ClassVar[str | None] = "length"

    length: int = 10
    layers: Layers = "upper"
    attention: str = "self"
    form: Literal["hypermodel", "deepshare"] = "hypermodel"
    hidden: int = 64

    def __post_init__(self) -> None:
        require_positive(self, "length", "hidden")
        require_choice(self, form=("hypermodel", "deepshare"))

    def point(self) -> Point:
        return Point(NonLinear(self.length, self.form, self.hidden), ZeroGate(), self.layers, self.attention)

    def count(self, layout: Layout) -> Count:
        sites = layout.select(self.layers, self.attention)
        adapted, d, h, length = len(sites), sites[0].hidden_size, self.hidden, self.length
        gates = sum(site.num_heads for site in sites)
        if self.form == "hypermodel":
            every = sum(len(layout.kinds[kind]) for kind in dict.fromkeys(site.kind for site in sites))  # N
            network = every * 64 + 64 * h + h + h * length * d + length * d
        else:
            network = adapted * length * 256 + 256 * h + h + h * d + d
        return Count(network + gates, adapted * length * d + gates)


@register
@dataclass(frozen=True)
class RandomInit(Method):
    """The baseline without zero initialisation: the same prompts in the tokens' own softmax, no gate.

        o_h = softmax(q_h [p W_k; K]ᵀ/√D) [p W_v; V]

    "Random" names the missing gate, not the draw of the prompts. Trainable and stored: L_a·l·d.

    Use it as a control for zero-init, with std = 1 as released and with a small std: much of the difference between
    the two is the scale of the initial prompt.

    Args:
        length: l, prompt tokens.
        layers: n for the top n layers, a list of layer numbers, "upper" for all but the lowest two, or None for every
            layer.
        attention: "self", or some of "self", "cross", "encoder" joined by "+", or "all".
        std: of the initial prompts N(0, std²).
    """

    name: ClassVar[str] = "random-init"
    learning_rate: ClassVar[float] = 1e-1
    citation: ClassVar[str] = _LLAMA_ADAPTER
    size: ClassVar[str | None] = "length"

    length: int = 10
    layers: Layers = "upper"
    attention: str = "self"
    std: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "length")

    def point(self) -> Point:
        return Point(Projected(self.length, self.std), Joint(), self.layers, self.attention)

    def count(self, layout: Layout) -> Count:
        total = sum(self.length * site.hidden_size for site in layout.select(self.layers, self.attention))
        return Count(total, total)
