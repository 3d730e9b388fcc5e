"""He et al.'s unified view: a checkpoint of github.com/jxhe/unify-parameter-efficient-tuning (BART, mBART, RoBERTa).

    config.json                        attn_mode, attn_option, ffn_mode, ffn_option, ffn_adapter_layernorm_option,
                                       ffn_adapter_scalar, attn_bn, ffn_bn, preseqlen, mid_dim
    prompt_model.wte, .control_trans   the prefix of self-attention; wte2 of cross-attention, wte_enc of the encoder's
    prompt_model.<place>_<key|value>.<i>   without the MLP, (l, d) a layer
    …<layer>.ef_ffn_adapter, …ef_attn_adapter   down_proj, up_proj, adapter_layer_norm_before, scale

Text has its own positions. An attention adapter always has a norm "in" and no scale, and in parallel adds before W_o.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ..errors import ForewordError
from ..methods.adapter import SequentialAdapter
from ..methods.parallel_adapter import ParallelAdapter
from ..model.layout import Block, Layout, Site
from .prefixes import MlpMap, mapped, prefix
from .source import Converted, Source, same_path

KINDS = {"self": "", "cross": "2", "encoder": "_enc"}  # of attention → what their names for its prefix end with
DIRECT = {"self": "decoder_self_attn", "cross": "decoder_cross_attn", "encoder": "encoder_attn"}


def matches(source: Source) -> bool:
    config = source.config("config.json")
    return "attn_mode" in config and "ffn_mode" in config


def read(source: Source, layout: Layout) -> Converted:
    """What a checkpoint of He et al.'s is here."""
    config = source.config("config.json")
    parts = [part for part in (_attention(source, layout, config), _ffn(source, layout, config)) if part is not None]
    if not parts:
        raise ForewordError(f"{source.path} has attn_mode={config['attn_mode']!r} and ffn_mode={config['ffn_mode']!r}")
    numbers = {
        f"{index}{name[1:]}": tensor for index, part in enumerate(parts) for name, tensor in part.numbers.items()
    }
    return Converted([method for part in parts for method in part.methods], numbers)


def _attention(source: Source, layout: Layout, config: Mapping[str, Any]) -> Converted | None:
    mode, option = config["attn_mode"], config.get("attn_option")
    if mode == "none":
        return None
    if mode in ("prefix", "prefix_nomlp"):
        if option != "concat":
            raise ForewordError(f"{source.path} has a prefix with attn_option={option!r}; only 'concat' converts")
        sites = {kind: layout.kinds[kind] for kind in KINDS if kind in layout.kinds}
        if mode == "prefix":
            return mapped(layout, {kind: (sites[kind], _map(source, kind)) for kind in sites}, text_after=False)
        return prefix(layout, _direct(source, sites), text_after=False)
    if mode != "adapter" or option not in ("parallel", "sequential"):
        raise ForewordError(f"{source.path} has attn_mode={mode!r} with attn_option={option!r}, which does not convert")
    settings: dict[str, Any] = {"bottleneck": config["attn_bn"], "scale": 1.0, "norm": "in", "bias": True}
    if option == "parallel":
        method: ParallelAdapter | SequentialAdapter = ParallelAdapter(site="attention", **settings)
        places: list[tuple[Site | Block, str]] = [(site, site.path) for site in layout.sites]
    else:
        method = SequentialAdapter(site="attention", **settings)
        behind = layout.model.config.model_type == "roberta"  # there it is a child of the output projection's module
        places = [
            (site.output, site.path.replace(".self", ".output") if behind else site.path) for site in layout.sites
        ]
    return _bottlenecks(source, method, [(place, f"{path}.ef_attn_adapter") for place, path in places])


def _ffn(source: Source, layout: Layout, config: Mapping[str, Any]) -> Converted | None:
    mode, option = config["ffn_mode"], config.get("ffn_option")
    if mode == "none":
        return None
    if mode != "adapter" or option not in ("parallel", "sequential", "pfeiffer"):
        raise ForewordError(f"{source.path} has ffn_mode={mode!r} with ffn_option={option!r}, which does not convert")
    scalar = config.get("ffn_adapter_scalar", "1.0")
    settings: dict[str, Any] = {
        "bottleneck": config["ffn_bn"],
        "scale": "learned" if scalar == "learnable_scalar" else float(scalar),
        "norm": config.get("ffn_adapter_layernorm_option", "in"),
        "bias": True,
    }
    method: ParallelAdapter | SequentialAdapter
    if option == "parallel":
        method = ParallelAdapter(site="ffn", **settings)
    else:
        method = SequentialAdapter(site="pfeiffer" if option == "pfeiffer" else "ffn", **settings)
    inside = ".output" if layout.model.config.model_type == "roberta" and option != "parallel" else ""
    blocks = method.blocks(layout)
    layers = [next(path for path in layout.layers if block.path.startswith(f"{path}.")) for block in blocks]
    return _bottlenecks(
        source,
        method,
        [(block, f"{layer}{inside}.ef_ffn_adapter") for block, layer in zip(blocks, layers, strict=True)],
    )


def _bottlenecks(
    source: Source, method: ParallelAdapter | SequentialAdapter, places: list[tuple[Site | Block, str]]
) -> Converted:
    numbers: dict[str, Tensor] = {}
    for place, path in places:
        start = _start(source, path)
        names = dict(_names(method))
        numbers |= {
            f"0.{place.label}.adapter.{ours}": source.tensor(f"{start}.{theirs}", *[None] * dims)
            for ours, (theirs, dims) in names.items()
        }
    return Converted([method], numbers)


def _names(method: ParallelAdapter | SequentialAdapter) -> Iterator[tuple[str, tuple[str, int]]]:
    """Our name of each tensor of a bottleneck → theirs, and how many dimensions it has."""
    for ours, theirs in (("down", "down_proj"), ("up", "up_proj")):
        yield ours, (f"{theirs}.weight", 2)
        yield f"{ours}_bias", (f"{theirs}.bias", 1)
    if method.norm != "none":
        for part in ("weight", "bias"):
            yield f"norm_{method.norm}.{part}", (f"adapter_layer_norm_before.{part}", 1)
    if method.scale == "learned":
        yield "learned_scale", ("scale", 1)


def _start(source: Source, path: str) -> str:
    """The dotted name in the file of the module that is called `path` in this model."""
    suffix = ".down_proj.weight"
    for name in source.tensors:
        if name.endswith(suffix) and same_path(name.removesuffix(suffix), path):
            return name.removesuffix(suffix)
    raise ForewordError(f"{source.weights} has no adapter {path}")


def _map(source: Source, kind: str) -> MlpMap:
    end = KINDS[kind]
    down, up = (
        (
            source.tensor(f"prompt_model.control_trans{end}.{i}.weight", None, None),
            source.tensor(f"prompt_model.control_trans{end}.{i}.bias", None),
        )
        for i in (0, 2)
    )
    return MlpMap(source.tensor(f"prompt_model.wte{end}.weight", None, None), down, up)


def _direct(source: Source, sites: Mapping[str, list[Site]]) -> dict[Site, tuple[Tensor, Tensor]]:
    states = {}
    for kind, members in sites.items():
        start = f"prompt_model.{DIRECT[kind]}"
        for index, site in enumerate(members):
            key, value = (
                source.tensor(f"{start}_{part}.{index}.weight", None, site.num_heads * site.key_dim)
                .unflatten(1, (site.num_heads, -1))
                .transpose(0, 1)
                for part in ("key", "value")
            )
            states[site] = (key, value)
    return states
