"""What one method placed on a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from .block_slot import Term, block_slot_of, evict_term
from .layout import Block, Site
from .slot import evict, slot_of

if TYPE_CHECKING:
    from ..space import Method
    from .host import Host


@dataclass
class Part:
    """What one method placed on a model: modules in the slots of attention modules and blocks.

    Attributes:
        method: the configuration.
        shared: module evaluated once a forward, for all sites; None where each site has its own.
        modules: the module at each place: a `Prefix` at a site, a `Term` at a block.
        shift: by how many positions the text moves, on models that look positions up.
        per_row: whether rows of one batch can differ in it.
        reads_prompt: whether it needs to know which tokens are the prompt.
    """

    method: Method
    shared: nn.Module | None
    modules: dict[Site | Block, nn.Module]
    shift: int = 0
    per_row: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.reads_prompt = any(getattr(module, "reads_prompt", False) for module in self.modules.values())

    # -----------------------------------------------------------------------------------------------------------------
    # On and off the model

    def install(self, host: Host, name: str, index: int, dtype: torch.dtype) -> None:
        """Hand the modules to the model, as part `index` of adapter `name`."""
        if self.shared is not None:
            host.place_shared(name, index, self.shared)
        if self.reads_prompt:
            host.watch_prompt()
        if self.shift:
            host.watch_positions()
        for place, module in self.modules.items():
            module.to(place.device, dtype)
            if isinstance(place, Site):
                slot_of(place).place(name, index, module)
            else:
                block_slot_of(place).place(name, index, module, place)
                host.watch_layers()
                if place.kind == "head":
                    host.watch_head()

    def remove(self, host: Host, name: str) -> None:
        """Take the modules out of the model."""
        for place in self.modules:
            if isinstance(place, Site):
                evict(place, name)
            else:
                evict_term(place, name)
        host.remove_shared(name)

    def set_active(self, active: bool) -> None:
        """Called when every forward begins, or ceases, to read the adapter. Slots ask the plan instead."""

    def claims(self) -> Iterator[tuple[str, str]]:
        """(place, what) for each place where a second method of the same adapter would contradict this one."""
        for place, module in self.modules.items():
            if isinstance(place, Block) and isinstance(module, Term) and module.exclusive:
                yield place.path, {0: "an in-place change", 2: "a sequential adapter"}[module.order]

    # -----------------------------------------------------------------------------------------------------------------
    # Numbers

    def named_modules(self) -> dict[str, nn.Module]:
        """Its modules by their name in an adapter file: `shared` and `<kind>.<layer>`."""
        shared = {} if self.shared is None else {"shared": self.shared}
        return shared | {place.label: module for place, module in self.modules.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{prefix}.{name}": parameter
            for prefix, module in self.named_modules().items()
            for name, parameter in module.named_parameters()
        }

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that training changes."""
        return [parameter for parameter in self.named_parameters().values() if parameter.requires_grad]

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by their name in an adapter file."""
        return {
            f"{prefix}.{name}": tensor
            for prefix, module in self.named_modules().items()
            for name, tensor in module.state_dict().items()
        }

    def num_stored(self) -> int:
        """How many numbers the stored form has."""
        folded = self._folded()
        stored = 0
        for place, module in self.modules.items():
            stored += _size(module)
            if place in folded:
                stored += _size(folded[place]) - _size(module.source)
        return stored if folded or self.shared is None else stored + _size(self.shared)

    def fold(self) -> None:
        """Replace reparameterisations by their stored form. Outputs are unchanged."""
        folded = self._folded()
        for site, source in folded.items():
            self.modules[site].source = source
        if folded:
            self.shared = None

    @torch.no_grad()
    def _folded(self) -> dict[Site | Block, nn.Module]:
        """The stored form of each site's source, where that differs from the source."""
        sources = {place: getattr(module, "source", None) for place, module in self.modules.items()}
        foldable = {place: source for place, source in sources.items() if hasattr(source, "fold")}
        shared = self.shared() if foldable and self.shared is not None else None
        return {place: source.fold(place, shared) for place, source in foldable.items()}


def _size(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.state_dict().values())
