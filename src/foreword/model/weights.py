"""Methods that train the model's own parameters: their values are the adapter, the base's come back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ..errors import ForewordError
from .part import Part

if TYPE_CHECKING:
    from .host import Host


@dataclass
class WeightsPart(Part):
    """Some of the model's parameters, with values of this adapter's own.

    A parameter keeps its identity, so optimizers and tied weights follow; its storage is exchanged: the base's while
    another adapter or none is active, this adapter's while it is.

    Attributes:
        tuned: the parameters by their name in an adapter file.
    """

    tuned: dict[str, nn.Parameter] = field(default_factory=dict)
    per_row: ClassVar[bool] = False

    def install(self, host: Host, name: str, index: int, dtype: torch.dtype) -> None:
        self._asleep = {key: parameter.detach().clone() for key, parameter in self.tuned.items()}
        self._active = False

    def remove(self, host: Host, name: str) -> None:
        """Called on an inactive adapter: the parameters hold the base's values already."""

    def set_active(self, active: bool) -> None:
        if active == self._active:
            return
        self._active = active
        for key, parameter in self.tuned.items():
            parameter.data, self._asleep[key] = self._asleep[key], parameter.data
            parameter.requires_grad_(active)

    def claims(self) -> Iterator[tuple[str, str]]:
        for key in self.tuned:
            yield key, "a trained copy of the weights"

    def named_modules(self) -> dict[str, nn.Module]:
        return {}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {f"weights.{key}": parameter for key, parameter in self.tuned.items()}

    def trainable(self) -> list[nn.Parameter]:
        return list(self.tuned.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"weights.{key}": parameter.detach() if self._active else self._asleep[key]
            for key, parameter in self.tuned.items()
        }

    def num_stored(self) -> int:
        return sum(parameter.numel() for parameter in self.tuned.values())


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's own parameters, each once, by names that no wrapping class and no layer of PEFT's changes."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return {
        name.removeprefix(prefix).replace(".base_layer", ""): parameter
        for name, parameter in model.named_parameters()
        if not is_added(name)
    }


def require_loaded(method: str, parameters: Iterable[nn.Parameter]) -> None:
    """Raise `ForewordError` where parameters that a method copies or wraps are not in memory (`device_map` offload)."""
    if any(parameter.is_meta for parameter in parameters):
        raise ForewordError(
            f"{method} needs the weights that it changes in memory, and device_map has offloaded some; load all, or "
            "use a method that adds keys and values"
        )


def is_added(name: str) -> bool:
    """Whether a parameter belongs to an adapter: a child module of ours, or what PEFT put beside a base layer."""
    return any(part.startswith(("foreword", "lora_", "ia3_", "vera_")) for part in name.split("."))
