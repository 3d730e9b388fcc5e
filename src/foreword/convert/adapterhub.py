"""Adapters of AdapterHub's `adapters`: `adapter_config.json` with a `config`, and a state dict of the model's names.

    prefix_tuning      …prefix_tunings.<name>.<kind>_prefix.wte, control_trans.0, .2, or the flat control_trans
    bottleneck (None)  <layer>.output[_adapters].adapters.<name>.adapter_down.0, adapter_up, behind or beside the FFN;
                       <layer>.attention[.output|_adapters].…, behind the attention
    union              of those: MAM; with gates and a LoRA: UniPELT

Text has its own positions. In a pre-norm model its parallel adapter reads the residual stream, and its sequential
adapter with `original_ln_before` the residual sum, both without a norm: `reads="residual"` here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..attention.readers import KeyValue
from ..errors import ForewordError
from ..methods.adapter import SequentialAdapter
from ..methods.bottleneck import ACTIVATIONS
from ..methods.parallel_adapter import ParallelAdapter
from ..methods.prompt_tuning import PromptTuning
from ..methods.unipelt import UniPELT
from ..model.blocks import LAYER
from ..model.layout import Block, Layout, Site
from ..model.projections import linears_of
from .prefixes import MlpMap, mapped, prefix, stacked
from .source import Converted, Source, same_path

ACTIVATION_NAMES = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu", "tanh": "tanh"}
EXPECTED = {  # otherwise their forward is no method here
    "phm_layer": False,
    "inv_adapter": None,
    "original_ln_after": True,
    "residual_before_ln": True,
    "adapter_residual_before_ln": False,
    "stochastic_depth": 0.0,
}


def matches(source: Source) -> bool:
    config = source.config("adapter_config.json")
    return isinstance(config.get("config"), dict) and "model_type" in config


def read(source: Source, layout: Layout) -> Converted:
    """What an adapter of AdapterHub's is here."""
    whole = source.config("adapter_config.json")
    if whole.get("model_type") != layout.model.config.model_type:
        raise ForewordError(
            f"{source.path} holds an adapter for a {whole.get('model_type')} model; this one is "
            f"{layout.model.config.model_type}"
        )
    config = whole["config"]
    parts = config["configs"] if config.get("architecture") == "union" else [config]
    if any(part.get("use_gating") for part in parts):
        return _unipelt(source, layout, parts)
    converted = [_part(source, layout, part) for part in parts]
    if len(converted) == 1:
        return converted[0]
    numbers = {
        f"{index}{name[1:]}": tensor for index, one in enumerate(converted) for name, tensor in one.numbers.items()
    }
    return Converted([method for one in converted for method in one.methods], numbers)


def _part(source: Source, layout: Layout, config: Mapping[str, Any]) -> Converted:
    match config.get("architecture"):
        case "prefix_tuning":
            return _prefix(source, layout, config)
        case None:
            return _bottleneck(source, layout, config)
        case "prompt_tuning" if layout.decoder_only:
            [name] = _names(source, r"prompt_tunings\.[^.]+\.prompt_embedding\.weight")
            rows = source.tensor(name, config["prompt_length"], None)
            return Converted([PromptTuning(len(rows))], {"0.shared.rows": rows})
    raise ForewordError(
        f"{source.path} is {config['architecture']} on {type(layout.model).__name__}, which no method here computes"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Prefixes


def _prefix(source: Source, layout: Layout, config: Mapping[str, Any]) -> Converted:
    if config["non_linearity"].lower() != "tanh":
        raise ForewordError(f"{source.path} makes its prefix with {config['non_linearity']}, not tanh")
    if hasattr(layout.model.config, "relative_attention_num_buckets"):
        raise ForewordError(
            f"{source.path}: with a prefix, `adapters` moves the text's own relative positions in "
            f"{type(layout.model).__name__}; no method here does that"
        )
    kinds = [kind for kind in ("encoder", "self", "cross") if _names(source, rf"\.{kind}_prefix\.")]
    left_out = set(config.get("leave_out", []))
    if not kinds or (left_out and len(kinds) > 1):
        raise ForewordError(f"{source.path} leaves layers out ({sorted(left_out)}) of several kinds of attention")
    sites = {kind: [site for site in layout.kinds.get(kind, []) if site.layer not in left_out] for kind in kinds}
    length = config["prefix_length"]
    if config["flat"]:
        states: dict[Site, KeyValue] = {}
        for kind in kinds:
            states |= stacked(_of_pool(source, kind, "control_trans").view(length, -1), sites[kind])
        return prefix(layout, states, text_after=False)
    return mapped(layout, {kind: (sites[kind], _map(source, kind)) for kind in kinds}, text_after=False)


def _map(source: Source, kind: str) -> MlpMap:
    down, up = (
        (_of_pool(source, kind, f"control_trans.{i}.weight"), _of_pool(source, kind, f"control_trans.{i}.bias"))
        for i in (0, 2)
    )
    return MlpMap(_of_pool(source, kind, "wte.weight"), down, up)


def _of_pool(source: Source, kind: str, name: str) -> Tensor:
    """A tensor of the prefix of one kind of attention; the file holds a copy of it for every layer."""
    names = _names(source, rf"\.prefix_tunings\.[^.]+\.{kind}_prefix\.{re.escape(name)}$")
    if not names:
        raise ForewordError(f"{source.weights} has no {name} of a {kind} prefix")
    return source.tensor(names[0], *[None] * source.tensors[names[0]].dim())


# ---------------------------------------------------------------------------------------------------------------------
# Bottlenecks


def _bottleneck(source: Source, layout: Layout, config: Mapping[str, Any]) -> Converted:
    found = _adapters(source, layout)
    method = _bottleneck_method(source, layout, config, found)
    blocks = {_place(block, layout): block for block in method.blocks(layout)}
    if blocks.keys() != found.keys():
        odd = sorted(blocks.keys() ^ found.keys())[0]
        raise ForewordError(f"{source.path} has adapters in another set of places than {method.name} has: {odd}")
    numbers: dict[str, Tensor] = {}
    for place, path in found.items():
        numbers |= {f"0.{blocks[place].label}.adapter.{k}": t for k, t in _numbers(source, path, config).items()}
    return Converted([method], numbers)


Place = tuple[str, str]  # dotted name of a layer of the model, and "attention", "cross" or "ffn"


def _adapters(source: Source, layout: Layout) -> dict[Place, str]:
    """Each bottleneck of the file: where it is → its dotted name in the file."""
    found = {}
    for name in _names(source, r"\.adapters\.[^.]+\.adapter_up\.weight$"):
        in_file = LAYER.match(name)
        layer = in_file and next((path for path in layout.layers if same_path(path, in_file.group())), None)
        if layer is None:
            raise ForewordError(f"{source.weights} has {name}, which is in no layer of this model")
        found[layer, _role(name)] = name.removesuffix(".adapter_up.weight")
    if not found:
        raise ForewordError(f"{source.weights} holds no bottleneck of a layer")
    return found


def _role(name: str) -> str:
    """What an adapter of the file stands behind or beside."""
    if "cross_attention_adapters" in name or re.search(r"decoder\.block\.\d+\.layer\.1\.", name):
        return "cross"
    return "attention" if re.search(r"attention_adapters|attention\.output|\.layer\.0\.adapters", name) else "ffn"


def _place(block: Block, layout: Layout) -> Place:
    [layer] = [path for path in layout.layers if f"{block.path}.".startswith(f"{path}.")]
    return layer, "cross" if block.kind == "cross-output" else "attention" if block.kind.endswith("output") else "ffn"


def _bottleneck_method(
    source: Source, layout: Layout, config: Mapping[str, Any], found: Mapping[Place, str]
) -> SequentialAdapter | ParallelAdapter:
    for key, expected in EXPECTED.items():
        if config.get(key, expected) != expected:
            raise ForewordError(f"{source.path} has {key}={config[key]!r}; adapters here compute {key}={expected!r}")
    activation = ACTIVATION_NAMES.get(config["non_linearity"].lower())
    if activation is None:
        raise ForewordError(
            f"{source.path} has non_linearity={config['non_linearity']!r}; adapters here have {', '.join(ACTIVATIONS)}"
        )
    widths = {source.tensors[f"{path}.adapter_up.weight"].shape[1] for path in found.values()}
    if len(widths) != 1 or (config["ln_before"] and config["ln_after"]):
        raise ForewordError(f"{source.path} has adapters of several widths or with two norms; here they have one")
    settings: dict[str, Any] = {
        "bottleneck": widths.pop(),
        "scale": config["scaling"] if isinstance(config["scaling"], float) else "learned",
        "norm": "in" if config["ln_before"] else "out" if config["ln_after"] else "none",
        "bias": True,
        "activation": activation,
        "layers": _layers(source, layout, config),
    }
    if config["scaling"] == "channel":
        settings["scale"] = 1.0
    pre_norm = all(ffn.post_norm is None for ffn in layout.ffns)
    roles = {role for _, role in found}
    if config["is_parallel"]:
        if roles != {"ffn"}:
            raise ForewordError(
                f"{source.path} has parallel adapters beside the attention; they convert beside the FFN"
            )
        return ParallelAdapter(reads="residual" if pre_norm else "normalised", **settings)
    if not config["original_ln_before"]:
        site: Any = "houlsby" if len(roles) > 1 else "ffn" if roles == {"ffn"} else "attention"
        kinds = [kind for kind in layout.kinds if ("cross" if kind == "cross" else "attention") in roles]
        return SequentialAdapter(site=site, attention="+".join(kinds) or "all", **settings)
    if roles != {"ffn"}:
        raise ForewordError(
            f"{source.path} has original_ln_before=True behind the attention; that converts behind the FFN"
        )
    return SequentialAdapter(site="pfeiffer", reads="residual" if pre_norm else "sublayer", **settings)


def _layers(source: Source, layout: Layout, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers that have an adapter, where some are left out."""
    left_out = set(config.get("leave_out") or [])
    if left_out and layout.model.config.is_encoder_decoder:
        raise ForewordError(
            f"{source.path} leaves layers out of an encoder-decoder; here both sides have the same ones"
        )
    every = [ffn.layer for ffn in layout.ffns if ffn.layer is not None]
    return tuple(layer for layer in every if layer not in left_out) if left_out else None


def _numbers(source: Source, path: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of one bottleneck by the names of `foreword.methods.bottleneck.Bottleneck`."""
    down = f"{path}.adapter_down.{1 if config['ln_before'] else 0}"
    numbers = {
        "down": source.tensor(f"{down}.weight", None, None),
        "down_bias": source.tensor(f"{down}.bias", None),
        "up": source.tensor(f"{path}.adapter_up.weight", None, None),
        "up_bias": source.tensor(f"{path}.adapter_up.bias", None),
    }
    if config["scaling"] == "learned":
        numbers["learned_scale"] = source.tensor(f"{path}.scaling", 1)
    elif config["scaling"] == "channel":  # s ⊙ (h W_u + b_u) folds into W_u and b_u
        scale = source.tensor(f"{path}.scaling", None)
        numbers["up"], numbers["up_bias"] = scale[:, None] * numbers["up"], scale * numbers["up_bias"]
    for key, ours, theirs in (("ln_before", "norm_in", "before"), ("ln_after", "norm_out", "after")):
        if config[key]:
            for part in ("weight", "bias"):
                numbers[f"{ours}.{part}"] = source.tensor(f"{path}.adapter_norm_{theirs}.{part}", None)
    return numbers


# ---------------------------------------------------------------------------------------------------------------------
# UniPELT


def _unipelt(source: Source, layout: Layout, parts: list[Mapping[str, Any]]) -> Converted:
    """A LoRA, a prefix and a sequential adapter, each with a gate."""
    kinds = {part.get("architecture"): part for part in parts if part.get("use_gating")}
    if set(kinds) != {"lora", "prefix_tuning", None} or len(parts) != 3:
        raise ForewordError(
            f"{source.path} has gates on {', '.join(map(str, kinds))}; UniPELT has one on all three parts"
        )
    if any(ffn.post_norm is None for ffn in layout.ffns) or layout.model.config.is_encoder_decoder:
        raise ForewordError(
            f"{source.path}: UniPELT converts on post-norm encoders such as BERT; on {type(layout.model).__name__} its "
            "adapter reads the residual stream, or its LoRA stands in cross-attention"
        )
    lora, prefixes, bottleneck = kinds["lora"], kinds["prefix_tuning"], kinds[None]
    adapter, prefix_ = _bottleneck(source, layout, bottleneck), _prefix(source, layout, prefixes)
    roles = {"q": "query", "k": "key", "v": "value"}
    targets = "+".join(roles[matrix] for matrix in lora["attn_matrices"])
    if adapter.methods != [SequentialAdapter(adapter.methods[0].bottleneck)] or not lora["selfattn_lora"]:  # type: ignore
        raise ForewordError(f"{source.path} is a UniPELT whose adapter or LoRA is set otherwise than here")
    numbers = prefix_.numbers | {f"1{name[1:]}": tensor for name, tensor in adapter.numbers.items()}
    for site in layout.sites:
        numbers |= _gate(source, f"0.{site.label}", rf"{re.escape(site.path)}\.prefix_tuning\.prefix_gates\.[^.]+")
    for ffn in layout.ffns:
        path = _adapters(source, layout)[_place(ffn.post_norm or ffn, layout)]
        numbers |= _gate(source, f"1.{(ffn.post_norm or ffn).label}", re.escape(path) + r"\.gate")
    for block in linears_of(layout, targets, "unipelt", kinds=("self", "encoder")):
        path = rf"{re.escape(block.path)}\.loras\.[^.]+"
        for name in ("lora_A", "lora_B"):
            [found] = _names(source, rf"{path}\.{name}$")
            numbers[f"2.{block.label}.{name}.weight"] = source.tensor(found, None, None)
        numbers |= _gate(source, f"2.{block.label}", rf"{path}\.gate")
    flat = prefixes["flat"]
    method = UniPELT(
        length=prefixes["prefix_length"],
        reparam=None if flat else "shared",
        hidden=prefixes["bottleneck_size"],
        bottleneck=adapter.methods[0].bottleneck,  # type: ignore[attr-defined]
        r=lora["r"],
        targets=targets,
    )
    note = "gates are the mean over the prompt's tokens here, over all tokens there"
    return Converted([method], numbers, [note])


def _gate(source: Source, label: str, pattern: str) -> dict[str, Tensor]:
    weights = _names(source, rf"{pattern}\.weight$")
    if len(weights) != 1:
        raise ForewordError(f"{source.weights} has {len(weights)} gates for {label}, where one is expected")
    weight = source.tensor(weights[0], 1, None)[0]
    return {f"{label}.gate.weight": weight, f"{label}.gate.bias": source.tensor(weights[0][:-6] + "bias", 1)}


def _names(source: Source, pattern: str) -> list[str]:
    return [name for name in source.tensors if re.search(pattern, name)]
