"""Adapters in files: a folder with `adapter.json` and one safetensors file that it names.

The JSON holds the methods, the base that the adapter was made for, and the name of the weights file, which contains a
hash of its content. Saving writes the weights under their new name first and then renames the JSON over the old one:
that rename is the one moment at which the old adapter becomes the new one. A process that is killed at any point
leaves an adapter that loads.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from .errors import ForewordError
from .files import atomic_path, read_json, write_json
from .model.attach import detach, place, set_active
from .model.host import host_of
from .model.layout import Layout
from .sources.text import Blank
from .space import Point, from_dict

if TYPE_CHECKING:
    from .model.adapter import Adapter

CONFIG = "adapter.json"
SUMMARY = "training.json"  # beside it, of the run that made it
FORMAT = 1
TRIES = 100  # at a folder to which other processes save without a pause

Result = TypeVar("Result")


def save(adapter: Adapter, path: str | Path) -> Path:
    """Write `adapter` to the folder `path`, over what it held. Returns the folder.

    Where its parameters are sharded (FSDP2), every process of the group has to call this: they are gathered, and the
    first process writes.

    Raises `ForewordError` where the folder can't be written, or PEFT has wrapped layers of the adapter; what the folder
    held is then unchanged.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ForewordError(f"can't save an adapter to {folder}: it is a file, not a folder")
    state = adapter.state_dict()
    wrapped = next((name for name in state if ".base_layer." in name), None)
    if wrapped is not None:
        raise ForewordError(
            f"can't save adapter {adapter.name!r}: PEFT has wrapped a layer of its own ({wrapped}); inject PEFT's "
            "adapter before `attach`, or name its target_modules"
        )
    whole = {name: gathered(tensor.detach()) for name, tensor in state.items()}
    if is_sharded(adapter) and torch.distributed.get_rank() != 0:
        return folder
    data = to_bytes({name: tensor.cpu().contiguous() for name, tensor in whole.items()})
    weights = f"adapter-{hashlib.sha256(data).hexdigest()[:12]}.safetensors"
    config = {
        "format": FORMAT,
        "methods": [method.to_dict() for method in adapter.methods],
        "folded": adapter.folded,
        "base": describe_base(adapter.model, adapter.host.layout),
        "weights": weights,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for cut_off in folder.glob(".adapter*.tmp"):  # by a process that was killed while it held the lock
                cut_off.unlink()
            with atomic_path(folder / weights) as temporary:
                temporary.write_bytes(data)
            write_json(folder / CONFIG, config)
            for old in folder.glob("adapter-*.safetensors"):
                if old.name != weights:
                    old.unlink()
    except OSError as error:
        raise ForewordError(f"can't save an adapter to {folder}: {error.strerror or error}") from error
    return folder


def is_sharded(adapter: Adapter) -> bool:
    """Whether each process holds a part of the adapter's parameters."""
    return any(isinstance(tensor, DTensor) for tensor in adapter.state_dict().values())


def gathered(tensor: Tensor) -> Tensor:
    """A whole tensor; where it is sharded, every process of the group has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load(model: PreTrainedModel, path: str | Path, name: str = "default") -> Adapter:
    """Attach the adapter in the folder `path`, or of that Hub id, to `model` under `name`, and make it active.

    Raises:
        ForewordError: a file is missing, damaged or not an adapter's, or the adapter was made for another base.
    """
    folder = resolve_folder(path)
    config, tensors = read(folder)
    host = host_of(model)
    try:
        check_base(config["base"], describe_base(model, host.layout), folder)
        check_sizes(config, host.layout, sum(tensor.numel() for tensor in tensors.values()), folder)
        active = host.active
        adapter = place(host, config["methods"], name, Blank(model, host.layout))
    except Exception:
        host.leave_if_empty()
        raise
    try:
        if config["folded"]:
            adapter.fold()
        fill(adapter, tensors, folder)
    except Exception:
        detach(model, name)
        set_active(model, active)
        raise
    return adapter


def restore(adapter: Adapter, path: str | Path) -> None:
    """Copy the numbers saved in the folder `path` into `adapter`, which must have the same methods.

    Raises `ForewordError` where the folder holds another kind of adapter, or is damaged; the adapter is then unchanged.
    """
    folder = Path(path)
    config, tensors = read(folder)
    if config["methods"] != adapter.methods or config["folded"] != adapter.folded:
        raise ForewordError(f"{folder} holds {config['methods']}, not the {adapter.methods} of this run")
    fill(adapter, tensors, folder)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The checked configuration (its methods as `Method`s) and the tensors of an adapter folder."""
    return with_weights(folder, lambda path: from_bytes(path.read_bytes()))  # opened once: whole, even if deleted then


def with_weights(folder: Path, use: Callable[[Path], Result]) -> tuple[dict[str, Any], Result]:
    """The checked configuration of an adapter folder, and what `use` makes of the weights file that it names.

    Where another process saves in between, that file is gone; the configuration then names its successor.
    """
    for _ in range(TRIES):
        config = read_config(folder)
        path = folder / config["weights"]
        try:
            return config, use(path)
        except FileNotFoundError:
            continue
        except (SafetensorError, OSError) as error:
            raise ForewordError(f"{path} is damaged: {error}") from error
    raise ForewordError(f"{path} does not exist, though {folder / CONFIG} names it")


def read_config(folder: Path) -> dict[str, Any]:
    """The checked `adapter.json` of a folder, its methods as `Method`s."""
    path = folder / CONFIG
    config = read_json(path)
    version = config.get("format") if isinstance(config, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ForewordError(f'{path} is not an adapter\'s configuration: it has no number "format" from 1')
    if version > FORMAT:
        raise ForewordError(f"{path} has format {version}; this version of foreword reads up to {FORMAT}")
    shapes = {"methods": list, "folded": bool, "base": dict, "weights": str}
    for key, kind in shapes.items():
        if not isinstance(config.get(key), kind):
            raise ForewordError(f'{path}: "{key}" is missing or not a {kind.__name__}')
    if not config["methods"]:
        raise ForewordError(f'{path}: "methods" is empty')
    if not isinstance(config["base"].get("attention"), dict):
        raise ForewordError(f'{path}: "base" has no "attention" with the shape of every layer')
    if not re.fullmatch(r"[\w-]+\.safetensors", config["weights"]):
        raise ForewordError(
            f'{path}: "weights" must be the name of a safetensors file in the same folder, not {config["weights"]!r}'
        )
    try:
        config["methods"] = [from_dict(method) for method in config["methods"]]
    except ForewordError as error:
        raise ForewordError(f"{path}: {error}") from error
    return config


def describe_base(model: PreTrainedModel, layout: Layout) -> dict[str, Any]:
    """What an adapter needs its base to be: architecture and the shape of every attention."""
    return {
        "model": model.config.name_or_path,
        "architecture": model.config.model_type,
        "attention": {
            site.label: [
                site.hidden_size,
                site.num_heads,
                site.num_key_value_heads,
                site.key_dim,
                site.value_dim,
            ]
            for site in layout.sites
        },
        "positions": "shift" if layout.absolute_positions else "noshift",
    }


def check_base(saved: Mapping[str, Any], present: Mapping[str, Any], folder: Path) -> None:
    """Raise `ForewordError` where an adapter's base is not the present one."""
    if saved.get("architecture") != present["architecture"]:
        raise ForewordError(
            f"{folder} holds an adapter for a {saved.get('architecture')} model; this one is {present['architecture']}"
        )
    theirs, ours = saved["attention"], present["attention"]
    if theirs.keys() != ours.keys():
        raise ForewordError(f"{folder} holds an adapter for {len(theirs)} attention layers; this model has {len(ours)}")
    for label, shape in ours.items():
        if theirs[label] != shape:
            raise ForewordError(
                f"{folder} holds an adapter for attention {label} of [d, H, G, D_k, D_v] = {theirs[label]}; this "
                f"model has {shape}"
            )


def check_sizes(config: Mapping[str, Any], layout: Layout, numbers: int, folder: Path) -> None:
    """Raise `ForewordError` where methods would need far more numbers than the file holds, before they are made.

    A field of a damaged or hostile file may be any number. Every unit of a size is at least one number of the file, but
    for those of a reparameterisation that was folded away.
    """
    allowed = numbers * (10_000 if config["folded"] else 16)  # less is named better where names and shapes are compared
    for method in config["methods"]:
        for name, size in sizes_of(method):
            if size > allowed:
                raise ForewordError(
                    f"{folder}: {name}={size} of {method.name} does not fit a file of {numbers} numbers"
                )
        needed = 0 if isinstance(method, Point) else method.count(layout).trainable
        if needed > allowed:
            raise ForewordError(f"{folder}: {method.name} has {needed} numbers, its file {numbers}")


def sizes_of(config: Any) -> Iterator[tuple[str, int]]:
    """The fields of a method, and of its source and combine, that are sizes."""
    for name in ("length", "hidden", "bottleneck", "r", "streams"):
        value = getattr(config, name, None)
        sizes = value if isinstance(value, (tuple, list)) else [value]
        unused = name == "hidden" and not getattr(config, "reparam", True)
        yield from ((name, size) for size in sizes if isinstance(size, int) and not unused)
    for axis in ("source", "combine"):
        if hasattr(config, axis):
            yield from sizes_of(getattr(config, axis))


def resolve_folder(path: str | Path) -> Path:
    """A local adapter folder, or the downloaded snapshot of a Hub id, with the summary of its training."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists() or str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ForewordError(f"{path} is not an adapter folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=[CONFIG, "adapter-*.safetensors", SUMMARY]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ForewordError(
            f"{path} is neither a local adapter folder nor a reachable Hub repository: {reason}"
        ) from error


def fill(adapter: Adapter, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy the saved tensors into the adapter's, all or none."""
    targets = adapter.state_dict()
    missing, unknown = sorted(targets.keys() - tensors.keys()), sorted(tensors.keys() - targets.keys())
    if missing or unknown:
        raise ForewordError(
            f"{folder}: the weights {f'lack {missing[0]}' if missing else f'have an unknown {unknown[0]}'}"
        )
    for name, target in targets.items():
        if tensors[name].shape != target.shape:
            raise ForewordError(
                f"{folder}: {name} has shape {list(tensors[name].shape)}, expected {list(target.shape)}"
            )
        if not tensors[name].is_floating_point() or not torch.isfinite(tensors[name]).all():
            raise ForewordError(f"{folder}: {name} holds {tensors[name].dtype} values that are not finite numbers")
    for name, target in targets.items():
        saved = tensors[name]
        if isinstance(target, DTensor):
            saved = distribute_tensor(saved.to(target.device), target.device_mesh, target.placements)
        target.copy_(saved)
