"""The handle of one adapter on one model."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .part import Part

if TYPE_CHECKING:
    from ..space import Method
    from .host import Host


class Adapter:
    """One adapter on one model, as `attach` and `load` return it.

    Attributes:
        name: on this model.
        methods: its configuration.
        parts: what its methods placed.
        folded: whether reparameterisations have collapsed to their stored form.
    """

    def __init__(self, host: Host, name: str, methods: list[Method], parts: list[Part]) -> None:
        self.host = host
        self.name = name
        self.methods = methods
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
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that training changes."""
        return [parameter for part in self.parts for parameter in part.trainable()]

    @property
    def num_trainable(self) -> int:
        """How many numbers training changes."""
        return sum(parameter.numel() for parameter in self.trainable_parameters)

    @property
    def num_stored(self) -> int:
        """How many numbers inference needs: the parameters after `fold`."""
        return sum(part.num_stored() for part in self.parts)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters by their name in an adapter file: `<part>.<kind>.<layer>.…`."""
        return {
            f"{index}.{name}": parameter
            for index, part in enumerate(self.parts)
            for name, parameter in part.named_parameters().items()
        }

    def requires_grad_(self, requires_grad: bool = True) -> Adapter:
        """Let training change its parameters, or leave them as they are. Returns the adapter.

        PEFT freezes all others where it injects an adapter of its own: this takes the freezing back.
        """
        for parameter in self.named_parameters().values():
            parameter.requires_grad_(requires_grad)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of the adapter by their name in an adapter file."""
        return {
            f"{index}.{name}": tensor
            for index, part in enumerate(self.parts)
            for name, tensor in part.state_dict().items()
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

    def push_to_hub(self, repo: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the adapter to the Hub with a model card. See `foreword.hub.push`, which uploads a saved folder."""
        from ..hub import push

        with TemporaryDirectory() as folder:
            return push(self.save(folder), repo, private=private, token=token)

    def install(self) -> None:
        """Hand the modules to the model that owns the places."""
        for index, part in enumerate(self.parts):
            part.install(self.host, self.name, index, self.dtype)

    def remove(self) -> None:
        """Take the modules out of the model."""
        for part in self.parts:
            part.remove(self.host, self.name)

    def set_active(self, active: bool) -> None:
        """Tell the parts that every forward begins, or ceases, to read the adapter."""
        for part in self.parts:
            part.set_active(active)
