"""The layers that PEFT put into a model, ours or the user's."""

from __future__ import annotations

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def peft_parameters(model: nn.Module) -> set[int]:
    """The ids of every parameter that belongs to an adapter of PEFT's."""
    return {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, BaseTunerLayer)
        for name in layer.adapter_layer_names
        for parameter in getattr(layer, name).parameters()
    }
