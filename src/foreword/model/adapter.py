"""The handle of one adapter on one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..space import Method, Part
from .slot import evict, slot_of

if TYPE_CHECKING:
    from .host import Host


class Adapter:
    """One adapter on one model, as `attach` and `load` return it.

    Attributes:
        name: on this model.
        parts: what each of its methods placed.
        folded: whether reparameterisations have collapsed to their stored form.
    """

    def __init__(self, host: Host, name: str, parts: list[Part]) -> None:
        self.host = host
        self.name = name
        self.parts = parts
        self.folded = False

    def __repr__(self) -> str:
        methods = " + ".join(repr(method) for method in self.methods)
        return f"Adapter({self.name!r}, {methods}, {self.num_trainable:,} trainable, {self.num_stored:,} stored)"

    @property
    def model(self) -> PreTrainedModel:
        return self.host.model

    @property
    def dtype(self) -> torch.dtype:
        """Of the adapter's numbers: fp32, or float64 beside a float64 model."""
        return torch.promote_types(self.model.dtype, torch.float32)

    @property
    def methods(self) -> list[Method]:
        return [part.method for part in self.parts]

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The adapter's parameters that require gradients."""
        return [parameter for parameter in self.named_parameters().values() if parameter.requires_grad]

    @property
    def num_trainable(self) -> int:
        """How many numbers training changes."""
        return sum(parameter.numel() for parameter in self.trainable_parameters)

    @property
    def num_stored(self) -> int:
        """How many numbers inference needs: the parameters after `fold`."""
        return sum(part.num_stored() for part in self.parts)

    def modules(self) -> dict[str, nn.Module]:
        """The adapter's modules by their name in an adapter file: `<part>.shared` and `<part>.<kind>.<layer>`."""
        found: dict[str, nn.Module] = {}
        for index, part in enumerate(self.parts):
            if part.shared is not None:
                found[f"{index}.shared"] = part.shared
            found |= {f"{index}.{site.label}": module for site, module in part.modules.items()}
        return found

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{prefix}.{name}": parameter
            for prefix, module in self.modules().items()
            for name, parameter in module.named_parameters()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of the adapter by their name in an adapter file."""
        return {
            f"{prefix}.{name}": tensor
            for prefix, module in self.modules().items()
            for name, tensor in module.state_dict().items()
        }

    def fold(self) -> Adapter:
        """Collapse reparameterisations to their stored form; outputs are unchanged. Returns the adapter."""
        for index, part in enumerate(self.parts):
            part.fold()
            if part.shared is None:
                self.host.remove_shared(self.name, index)
        self.folded = True
        return self

    def save(self, path: str | Path) -> Path:
        """Write the adapter to a folder, whole or not at all. See `foreword.checkpoint.save`."""
        from ..checkpoint import save

        return save(self, path)

    def install(self) -> None:
        """Hand the modules to the model that owns the sites."""
        for index, part in enumerate(self.parts):
            if part.shared is not None:
                self.host.place_shared(self.name, index, part.shared)
            for site, module in part.modules.items():
                device = site.call.arguments["hidden_states"].device
                slot_of(site).place(self.name, index, module.to(device, self.dtype))

    def remove(self) -> None:
        """Take the modules out of the model."""
        for part in self.parts:
            for site in part.modules:
                evict(site, self.name)
        self.host.remove_shared(self.name)
