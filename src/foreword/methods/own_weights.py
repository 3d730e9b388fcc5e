"""The baselines that train the model's own parameters: BitFit and full fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from transformers import PreTrainedModel

from ..errors import ForewordError
from ..model.layout import Layout
from ..model.weights import WeightsPart, parameters_of, require_loaded
from ..sources.text import Start
from ..space import Count, Method, register


@register
@dataclass(frozen=True)
class BitFit(Method):
    """Train the bias vectors, those of layer norms included, and nothing else. A baseline.

        b ← b + Δb

    A model without biases (LLaMA and its relatives) has nothing to train and is refused; zero biases that are added
    to one are `llama-adapter-v2`. Trainable and stored: all biases. An adapter holds their values, and switching
    adapters exchanges them.

    Use it as the smallest baseline on models of BERT's and GPT-2's time, which have biases everywhere.
    """

    name: ClassVar[str] = "bitfit"
    learning_rate: ClassVar[float] = 3e-3
    citation: ClassVar[str] = (
        "Ben Zaken, Ravfogel & Goldberg, BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked "
        "Language-models, ACL 2022"
    )

    def build(self, layout: Layout, start: Start) -> WeightsPart:
        return WeightsPart(self, None, {}, tuned=self._biases(start.model))

    def count(self, layout: Layout) -> Count:
        total = sum(parameter.numel() for parameter in self._biases(layout.model).values())
        return Count(total, total)

    def _biases(self, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        biases = {name: p for name, p in parameters_of(model).items() if "bias" in name.rsplit(".", 1)[-1]}
        require_loaded(self.name, biases.values())
        if not biases:
            raise ForewordError(
                f"bitfit has nothing to train: {type(model).__name__} has no biases; llama-adapter-v2 adds biases to "
                "every layer"
            )
        return biases


@register
@dataclass(frozen=True)
class Full(Method):
    """Train every parameter of the model. The baseline that the others are measured against.

        W ← W + ΔW

    Trainable and stored: the whole model. An adapter holds a copy of every weight; switching adapters exchanges them.

    Use it to know what the others give up. With little data it forgets: compare held-out loss, not training loss.
    """

    name: ClassVar[str] = "full"
    learning_rate: ClassVar[float] = 3e-4
    citation: ClassVar[str] = ""

    def build(self, layout: Layout, start: Start) -> WeightsPart:
        return WeightsPart(self, None, {}, tuned=self._weights(start.model))

    def count(self, layout: Layout) -> Count:
        total = sum(parameter.numel() for parameter in self._weights(layout.model).values())
        return Count(total, total)

    def _weights(self, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        weights = parameters_of(model)
        require_loaded(self.name, weights.values())
        plain = nn.Parameter  # torchao's quantized weights are of classes of their own
        frozen = [name for name, p in weights.items() if not p.is_floating_point() or type(p) is not plain]
        if frozen:
            raise ForewordError(f"full can't train {type(model).__name__}: {frozen[0]} is quantized")
        return weights
