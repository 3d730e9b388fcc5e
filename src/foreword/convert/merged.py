"""A plain transformers checkpoint whose weights contain the adapter, for methods that fold into weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from ..errors import ForewordError
from ..model.adapter import Adapter
from ..model.peft_part import PeftPart
from ..model.weights import WeightsPart, is_added


@torch.no_grad()
def write(adapter: Adapter, folder: Path) -> list[str]:
    """Write the model's own checkpoint with the adapter in its weights. The model here stays as it is, bit for bit.

    Raises `ForewordError` where the method does not fold into weights, or the weights are quantized.
    """
    if any(type(part) not in (PeftPart, WeightsPart) for part in adapter.parts):
        names = " + ".join(method.name for method in adapter.methods)
        raise ForewordError(f"{names} does not fold into a model's weights; lora, ia3, vera, bitfit and full do")
    model, active = adapter.model, adapter.host.active
    adapter.host.activate(adapter.name)
    try:
        with ExitStack() as merged:
            for part in adapter.parts:
                if isinstance(part, PeftPart):
                    for layer in part.layers.values():
                        merged.enter_context(_merged(layer, part.key))
            weights = {
                _plain(name): tensor.clone() for name, tensor in model.state_dict().items() if not is_added(name)
            }
    finally:
        adapter.host.activate(active)
    model.save_pretrained(folder, state_dict=weights)
    return []


@contextmanager
def _merged(layer: BaseTunerLayer, key: str) -> Iterator[None]:
    """Within the block the weights under a layer of PEFT's contain one of its adapters."""
    base = layer.get_base_layer()
    kept = {parameter: parameter.detach().clone() for parameter in base.parameters()}
    if not all(parameter.is_floating_point() for parameter in kept):
        raise ForewordError(f"can't merge into {type(base).__name__}: its weights are quantized")
    try:
        layer.merge(adapter_names=[key])
        yield
    finally:
        layer.merged_adapters.clear()
        for parameter, value in kept.items():  # rather than PEFT's unmerge, which subtracts
            parameter.data.copy_(value)


def _plain(name: str) -> str:
    """A parameter's name in the model without PEFT's layers around it."""
    return name.replace(".base_layer.", ".")
