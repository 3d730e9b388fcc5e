"""The released layout of ParScale: a Qwen2 checkpoint whose state dict also has prefixes and an aggregator.

    model.layers.<i>.self_attn.prefix_k, prefix_v    (P, G, l, D), in cache space, at the angle of position 0
    model.aggregate_layer.0.weight, .bias            (d, P·d) with column h·P + p for stream p, (d,)
    model.aggregate_layer.2.weight, .bias            (P, d), (P,)

and a config with `parscale_n` (P), `parscale_n_tokens` (l) and `parscale_attn_smooth` (ε), as
github.com/QwenLM/ParScale and the models of huggingface.co/ParScale have it. With P = 1 it is a plain Qwen2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from ..errors import ForewordError
from ..files import atomic_path, read_json, write_json
from ..methods.parscale import ParScale
from ..model.adapter import Adapter
from ..model.attach import place
from ..model.host import host_of
from ..model.stream_part import StreamPart
from ..sources.text import Blank
from .source import Source

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
OWN_FIELDS = ("parscale_n", "parscale_n_tokens", "parscale_attn_smooth", "architectures", "auto_map", "model_type")


def matches(source: Source) -> bool:
    return "parscale_n" in source.config("config.json")


def write(adapter: Adapter, folder: Path) -> list[str]:
    """`save_parscale` of the only set, for the registry of formats."""
    save_parscale(adapter, folder)
    return []


def base_of(folder: str | Path, dtype: torch.dtype | None = None) -> Qwen2ForCausalLM:
    """The model under the streams of a released checkpoint: a plain Qwen2, in evaluation mode.

    Checkpoints whose base trained too (the 1.8B and QwenInit models) exist with this base only; those over a frozen
    Qwen2.5 have the weights of that.

    Args:
        folder: local, with config.json and safetensors.
        dtype: of the weights; as in the file by default.

    Raises:
        ForewordError: a file is missing or damaged, or holds another layout.
    """
    config = _config(Path(folder))
    tensors = {name: tensor for name, tensor in _tensors(Path(folder)).items() if not _is_own(name)}
    if dtype is None:
        dtype = next(iter(tensors.values())).dtype
    plain = Qwen2Config(**{name: value for name, value in config.items() if name not in OWN_FIELDS})
    model = Qwen2ForCausalLM(plain)
    torch.nn.Module.to(model, dtype=dtype)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if plain.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        raise ForewordError(f"{folder} is no Qwen2 checkpoint: it {_difference(missing, unexpected)}")
    model.tie_weights()
    model.name_or_path = str(folder)
    return model.eval()


def load_parscale(model: PreTrainedModel, folder: str | Path, name: str = "default") -> Adapter:
    """Attach the streams of a released checkpoint to `model` under `name`, and make them the active adapter.

    Args:
        model: the Qwen2 that the checkpoint was trained on: `base_of(folder)`, or the Qwen2.5 of a frozen-base
        checkpoint. folder: local, with config.json and safetensors.

    Raises:
        ForewordError: a file is missing or damaged, P is 1, or the checkpoint's base is another than `model`.
    """
    folder = Path(folder)
    config = _config(folder)
    if config["parscale_n"] == 1:
        raise ForewordError(f"{folder} has one stream, which is the base model alone; load it with base_of")
    tensors = _tensors(folder)
    _check_base(model, tensors, folder)
    method = ParScale(
        config["parscale_n"], config["parscale_n_tokens"], smoothing=float(config["parscale_attn_smooth"])
    )
    host = host_of(model)
    try:
        adapter = place(host, [method], name, Blank(model, host.layout))
    except Exception:
        host.leave_if_empty()
        raise
    for key, target in _named(_set(adapter, None)).items():
        target.data.copy_(tensors[key])
    return adapter


def save_parscale(adapter: Adapter, folder: str | Path, streams: int | None = None) -> Path:
    """Write a set of streams and its base in the released layout. Returns the folder.

    Reparameterised prefixes are written in their stored form, all numbers in the dtype of the model.

    Args:
        adapter: of `ParScale` and nothing else, on a Qwen2.
        streams: which set; the only one with P ≥ 2 by default.

    Raises:
        ForewordError: the layout can't hold the adapter, or the folder can't be written.
    """
    model, folder = adapter.model, Path(folder)
    part = _set(adapter, streams)
    method = part.method
    assert isinstance(method, ParScale)
    tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if "foreword" not in name.split(".") and not (tied and name == "lm_head.weight")
    }
    tensors |= {name: tensor.detach().to(model.dtype) for name, tensor in _named(part).items()}
    config = model.config.to_dict() | {
        "model_type": "qwen2_parscale",
        "architectures": ["Qwen2ParScaleForCausalLM"],
        "parscale_n": part.streams,
        "parscale_n_tokens": method.length,
        "parscale_attn_smooth": method.smoothing,
    }
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
    write_json(folder / "config.json", json.loads(json.dumps(config, default=str)))
    return folder


def _set(adapter: Adapter, streams: int | None) -> StreamPart:
    """The set to write."""
    if adapter.model.config.model_type != "qwen2":
        raise ForewordError(f"the released layout is a Qwen2's; this model is {adapter.model.config.model_type}")
    parts = [part for part in adapter.parts if isinstance(part, StreamPart)]
    if not parts or len(parts) < len(adapter.parts):
        raise ForewordError(f"the released layout holds parscale alone, not {adapter.methods}")
    sets = {part.streams: part for part in parts if part.streams > 1}
    if streams is None and len(sets) == 1:
        return next(iter(sets.values()))
    if streams not in sets:
        raise ForewordError(
            f"the released layout holds one set of P ≥ 2: give streams, one of {', '.join(map(str, sets)) or 'none'}"
        )
    return sets[streams]


def _named(part: StreamPart) -> dict[str, Tensor]:
    """The numbers of a set by their names in the released layout."""
    named: dict[str, Tensor] = {}
    for site in part.sites:
        key, value = part.modules[site].source.every()
        named[f"model.layers.{site.layer}.self_attn.prefix_k"] = key
        named[f"model.layers.{site.layer}.self_attn.prefix_v"] = value
    assert part.aggregator is not None, "one stream has no numbers"
    for index, linear in {0: part.aggregator.hidden, 2: part.aggregator.scores}.items():
        named[f"model.aggregate_layer.{index}.weight"] = linear.weight
        named[f"model.aggregate_layer.{index}.bias"] = linear.bias
    return named


def _is_own(name: str) -> bool:
    return name.endswith((".prefix_k", ".prefix_v")) or ".aggregate_layer." in name


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    for field in OWN_FIELDS[:3]:
        if not isinstance(config, dict) or not isinstance(config.get(field), (int, float)):
            raise ForewordError(f'{folder / "config.json"} is no config of ParScale: it has no number "{field}"')
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of one or several safetensors files."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        files = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise ForewordError(f"{folder / name} does not exist") from error
        except (SafetensorError, OSError) as error:
            raise ForewordError(f"{folder / name} is damaged: {error}") from error
    return tensors


def _check_base(model: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise `ForewordError` where the checkpoint's base is not `model`, by shapes and by norms and biases."""
    own = {name: tensor for name, tensor in model.state_dict().items() if "foreword" not in name.split(".")}
    theirs = {name: tensor for name, tensor in tensors.items() if not _is_own(name)}
    missing = [name for name in own if name not in theirs and name != "lm_head.weight"]
    unexpected = [name for name in theirs if name not in own]
    if missing or unexpected:
        difference = _difference(missing, unexpected)
        raise ForewordError(f"{folder} has another base than this {type(model).__name__}: it {difference}")
    for name, tensor in theirs.items():
        if tensor.shape != own[name].shape:
            shapes = list(tensor.shape), list(own[name].shape)
            raise ForewordError(f"{folder} has another base: its {name} is {shapes[0]}, this model's {shapes[1]}")
    for name, tensor in theirs.items():
        if tensor.dim() == 1 and not torch.equal(tensor.to(own[name]), own[name]):
            raise ForewordError(f"{folder} was trained with its own base: its {name} differs; load that with base_of")


def _difference(missing: list[str], unexpected: list[str]) -> str:
    return f"lacks {missing[0]}" if missing else f"has a {unexpected[0]} besides"
