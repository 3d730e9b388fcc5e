"""A foreign adapter on the disk, and the adapter that it becomes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import ParameterList
from transformers import PreTrainedModel

from ..checkpoint import fill
from ..errors import ForewordError
from ..files import read_json
from ..model.adapter import Adapter
from ..model.attach import detach, place, set_active
from ..model.host import host_of
from ..sources.text import Blank
from ..space import Method

WEIGHTS = (  # in the order in which they are preferred
    "adapter_model.safetensors",
    "adapter.safetensors",
    "model.safetensors",
    "kv_cache.safetensors",
    "adapter_model.bin",
    "pytorch_adapter.bin",
    "pytorch_model.bin",
)
PICKLED = (".bin", ".pt", ".pth", ".torch", ".adapter", ".adapter_v2")


class Source:
    """A folder or a file that holds an adapter of another library; nothing is read before it is asked for.

    Pickled files are read with `weights_only=True`: numbers come out of them and nothing else.

    Args:
        path: local. Raises `ForewordError` where there is nothing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise ForewordError(f"there is no {path}; an adapter to convert is a local folder or file")

    def config(self, name: str) -> dict[str, Any]:
        """The JSON object in the file `name` of the folder; empty where there is no such file."""
        path = self.path / name
        if not self.path.is_dir() or not path.is_file():
            return {}
        config = read_json(path)
        if not isinstance(config, dict):
            raise ForewordError(f"{path} must hold a JSON object, not a {type(config).__name__}")
        return config

    @cached_property
    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        named = [self.path / name for name in WEIGHTS if (self.path / name).is_file()]
        return named + sorted(path for path in self.path.iterdir() if path.suffix in PICKLED)

    @property
    def has_weights(self) -> bool:
        return bool(self._files)

    @property
    def is_pickled(self) -> bool:
        return self.has_weights and self.weights.suffix in PICKLED

    @property
    def weights(self) -> Path:
        """The file with the numbers."""
        if not self._files:
            raise ForewordError(
                f"{self.path} holds no weights: neither {', '.join(WEIGHTS)} nor another pickle of torch"
            )
        return self._files[0]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name; a `model` or `state_dict` around them is left out, lists are numbered."""
        if self.weights.suffix == ".safetensors":
            try:
                return load_file(self.weights)
            except (SafetensorError, OSError) as error:
                raise ForewordError(f"{self.weights} is damaged: {error}") from error
        try:
            with torch.serialization.safe_globals([ParameterList]):
                content = torch.load(self.weights, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ForewordError(f"can't read {self.weights} as tensors and nothing else: {reason}") from error
        for wrapper in ("model", "state_dict"):
            if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
                content = content[wrapper]
        return dict(_flat(content, ""))

    def tensor(self, name: str, *shape: int | None) -> Tensor:
        """The tensor of that name in fp32, or float64. Raises `ForewordError` where it is missing or has another shape.

        Args:
            shape: expected; None for a dimension of any size.
        """
        if name not in self.tensors:
            raise ForewordError(f"{self.weights} has no {name}")
        tensor = self.tensors[name].detach()
        expected = [size if want is None else want for want, size in zip(shape, tensor.shape, strict=False)]
        if not tensor.is_floating_point() or len(shape) != tensor.dim() or expected != list(tensor.shape):
            wanted = ["any" if size is None else size for size in shape]
            raise ForewordError(f"{self.weights}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {wanted}")
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def same_path(one: str, other: str) -> bool:
    """Whether two dotted names are of one module, though one of the models may have a head around it."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def _flat(content: Any, prefix: str) -> Any:
    if isinstance(content, Tensor):
        yield prefix, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(content, (list, tuple, ParameterList)):
        for index, value in enumerate(content):
            yield from _flat(value, f"{prefix}.{index}")


@dataclass
class Converted:
    """What a foreign adapter is here.

    Attributes:
        methods: its configuration.
        numbers: its tensors by their name in an adapter file, see `Adapter.state_dict`.
        notes: what the user should know: one sentence each.
    """

    methods: list[Method]
    numbers: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)

    def attach(self, model: PreTrainedModel, name: str, path: Path) -> Adapter:
        """Place it on the model under `name`, active. Raises `ForewordError` where the model doesn't fit."""
        host = host_of(model)
        active = host.active
        try:
            adapter = place(host, self.methods, name, Blank(model, host.layout))
        except Exception:
            host.leave_if_empty()
            raise
        try:
            fill(adapter, self.numbers, path)
        except Exception:
            detach(model, name)
            set_active(model, active)
            raise
        return adapter
