"""Adapters that PEFT makes (LoRA, IA3, VeRA), beside ours on one model.

PEFT's own tuner wraps linear layers of the model, which stays its own class, and does the computation. Each adapter
has wrappers of its own, inside those that are there already. What is done here is to leave everything else as it was:
the gradients and active adapters of a LoRA that the user injected, the model's attributes, and, when the adapter
goes, the model's modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..errors import ForewordError
from .frames import current
from .layout import Block
from .part import Part
from .weights import require_loaded

if TYPE_CHECKING:
    from .host import Host

BASE = "__base__"  # PEFT's name for rows that read no adapter


@dataclass
class PeftPart(Part):
    """One adapter of PEFT's at some linear layers.

    Attributes:
        targets: the linear layers.
        config: PEFT's configuration, naming them.
        seed: of the initialisation.
        mixes: whether PEFT's layers of this kind can mix adapters in one batch.
    """

    targets: list[Block] = field(default_factory=list)
    config: PeftConfig | None = None
    seed: int = 0
    mixes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.per_row = self.mixes
        self.layers: dict[Block, BaseTunerLayer] = {}
        self._handles: list[RemovableHandle] = []

    def install(self, host: Host, name: str, index: int, dtype: torch.dtype) -> None:
        self.host, self.name, self.key = host, name, f"{name}-{index}"
        model = host.model
        paths = [block.path for block in self.targets]
        require_loaded(self.method.name, [p for block in self.targets for p in block.module.parameters()])
        with (
            _everything_else_kept(model),
            _wrappers_off(model, paths),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of what PEFT says about a second adapter
            torch.manual_seed(self.seed)
            try:
                PEFT_TYPE_TO_TUNER_MAPPING[self.config.peft_type](model, self.config, self.key)
            except (ValueError, TypeError) as error:
                self.layers = _layers_with(model, self.targets, self.key)
                reason = str(error).strip().splitlines()[0]
                raise ForewordError(f"{self.method.name}: PEFT can't adapt {type(model).__name__}: {reason}") from error
        self.layers = _layers_with(model, self.targets, self.key)
        for block, layer in self.layers.items():
            self.modules[block] = _Owned(layer, self.key).to(dtype=dtype).requires_grad_(True)
            _cast_frozen(layer, self.key, dtype)
        self._handles = [
            layer.register_forward_pre_hook(self.choose_rows, with_kwargs=True)
            for layer in self.layers.values()
            if self.mixes
        ]
        if self.mixes:
            host.watch_layers()
        self.set_active(False)

    def remove(self, host: Host, name: str) -> None:
        for handle in self._handles:
            handle.remove()
        for block, layer in self.layers.items():
            _unwrap(host.model, block.path, layer)
            self.modules.pop(block, None)

    def set_active(self, active: bool) -> None:
        for layer in self.layers.values():
            with _gradients_kept(layer):
                layer.set_adapter([self.key] if active else [])

    def choose_rows(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook of PEFT's layer: name the adapter of each row, where rows differ from what is active."""
        frame = current()
        if frame is None or frame.plan.reads_only(self.host.active):
            return None
        tokens = args[0].shape[0] // frame.batch  # 1, but where a model lays tokens flat
        names = [BASE] * args[0].shape[0]
        if self.name in frame.plan.rows:
            rows = frame.plan.rows[self.name]
            for row in range(frame.batch) if rows is None else rows.tolist():
                names[row * tokens : (row + 1) * tokens] = [self.key] * tokens
        return args, {**kwargs, "adapter_names": names}


class _Owned(nn.Module):
    """The modules and parameters of one adapter in a layer of PEFT's, by PEFT's names for them."""

    def __init__(self, layer: BaseTunerLayer, key: str) -> None:
        super().__init__()
        for attribute in layer.adapter_layer_names:
            holder = getattr(layer, attribute)
            if key in holder:
                setattr(self, attribute, holder[key])


def _cast_frozen(layer: BaseTunerLayer, key: str, dtype: torch.dtype) -> None:
    """The frozen matrices of VeRA, which it makes in the dtype of the model, in that of what multiplies them."""
    for attribute in layer.other_param_names:
        holder = getattr(layer, attribute, None)
        if isinstance(holder, nn.Module) and key in holder:
            holder[key] = holder[key].to(dtype)


@contextmanager
def _everything_else_kept(model: PreTrainedModel) -> Iterator[None]:
    """PEFT's injection freezes what is not its own, activates its adapter alone and marks the model: undo all that."""
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    active = {layer: list(layer.active_adapters) for layer in model.modules() if isinstance(layer, BaseTunerLayer)}
    config = model.__dict__.pop("peft_config", None)
    try:
        yield
    finally:
        for layer, names in active.items():
            layer.set_adapter(names)
        for parameter, requires_grad in required.items():
            parameter.requires_grad_(requires_grad)
        model.__dict__.pop("peft_config", None)
        if config is not None:
            model.peft_config = config


@contextmanager
def _wrappers_off(model: nn.Module, paths: list[str]) -> Iterator[None]:
    """Show PEFT the model's own layers at `paths`; put the wrappers that were there back around what it makes."""
    chains = [chain for path in paths if (chain := list(_chain(model, path)))]
    for chain in chains:
        parent, attribute, _ = chain[0]
        setattr(parent, attribute, chain[-1][2].base_layer)
    try:
        yield
    finally:
        for chain in chains:
            parent, attribute, outermost = chain[0]
            chain[-1][2].base_layer = getattr(parent, attribute)
            setattr(parent, attribute, outermost)


@contextmanager
def _gradients_kept(layer: nn.Module) -> Iterator[None]:
    required = {parameter: parameter.requires_grad for parameter in layer.parameters()}
    try:
        yield
    finally:
        for parameter, requires_grad in required.items():
            parameter.requires_grad_(requires_grad)


def _chain(model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, layer) for each layer of PEFT's around the linear layer at `path`, from the outermost in."""
    parent_path, _, attribute = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    while isinstance(layer := getattr(parent, attribute), BaseTunerLayer):
        yield parent, attribute, layer
        parent, attribute = layer, "base_layer"


def _layers_with(model: nn.Module, blocks: list[Block], key: str) -> dict[Block, BaseTunerLayer]:
    """The layer of PEFT's at each block that has the adapter `key`."""
    return {
        block: layer
        for block in blocks
        for _, _, layer in _chain(model, block.path)
        if any(key in getattr(layer, attribute) for attribute in layer.adapter_layer_names)
    }


def _unwrap(model: nn.Module, path: str, emptied: BaseTunerLayer) -> None:
    parent, attribute = next((parent, name) for parent, name, layer in _chain(model, path) if layer is emptied)
    setattr(parent, attribute, emptied.base_layer)
