"""LitGPT's adapters: `lit_model.pth.adapter` and `.adapter_v2`.

    transformer.h.<i>.attn.adapter_wte.weight   (l, d), in the layers from `adapter_start_layer` on
    transformer.h.<i>.attn.gating_factor        (1, 1, H, 1), a factor without tanh; (1, H, 1, 1) in older files
    …<linear>.adapter_scale, .adapter_bias      v2: s ⊙ (W x + b), of the output head too
    …norm_1, norm_2, ln_f                       v2: trained norms

LitGPT stores the projections of queries, keys and values one after the other, but cuts what they make of the prompt
as if those of each group of heads stood together (so does 0.5.13). Its prompts therefore read other rows than W_k and
W_v; `fused="grouped"` is for files of versions that stored them so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..attention.readers import KeyValue
from ..errors import ForewordError
from ..methods.llama_adapter_v2 import LlamaAdapterV2
from ..model.layout import Block, Layout, Site
from ..model.projections import ROLES, projections
from .gated import gated, gated_states
from .source import Converted, Source

NAMES = {  # a module of transformers' llama → LitGPT's
    "q_proj": "attn.qkv",
    "k_proj": "attn.qkv",
    "v_proj": "attn.qkv",
    "o_proj": "attn.proj",
    "gate_proj": "mlp.fc_1",
    "up_proj": "mlp.fc_2",
    "down_proj": "mlp.proj",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
LAYER = re.compile(r"transformer\.h\.(\d+)\.attn\.adapter_wte\.weight")


def matches(source: Source) -> bool:
    return source.is_pickled and any(LAYER.fullmatch(name) for name in source.tensors)


def read(source: Source, layout: Layout, fused: Literal["split", "grouped"] = "split") -> Converted:
    """What an adapter of LitGPT's is here.

    Args:
        fused: how the version that trained it stored the fused projection: "split", or "grouped" before 0.5.4.
    """
    if fused not in ("split", "grouped"):
        raise ForewordError(f"fused must be 'split' or 'grouped', not {fused!r}")
    layers = sorted(int(match.group(1)) for name in source.tensors if (match := LAYER.fullmatch(name)))
    by_layer = {site.layer: site for site in layout.kinds["self"]}
    absent = [layer for layer in layers if layer not in by_layer]
    if absent:
        raise ForewordError(
            f"{source.weights} has a prompt of layer {absent[0]}; this model has {len(by_layer)} layers"
        )
    sites = [by_layer[layer] for layer in layers]
    prompts = [source.tensor(f"transformer.h.{s.layer}.attn.adapter_wte.weight", None, s.hidden_size) for s in sites]
    gates = [_gate(source, site) for site in sites]
    second = any(name.endswith("adapter_scale") for name in source.tensors)
    v2 = _v2(source, layout) if second else None
    if fused == "grouped":
        return _joined(v2, gated(layout, sites, prompts, gates, tanh=False))
    states = {
        site: _misread(layout, site, prompt, {} if v2 is None else v2.numbers)
        for site, prompt in zip(sites, prompts, strict=True)
    }
    note = "LitGPT's prompts read mixed rows of its fused projection: stored as keys and values"
    return _joined(v2, gated_states(layout, states, gates, [note]))


def _joined(v2: Converted | None, prompts: Converted) -> Converted:
    """Scales, biases and norms, if there are any, and prompts as a second part."""
    if v2 is None:
        return prompts
    numbers = v2.numbers | {f"1{name[1:]}": tensor for name, tensor in prompts.numbers.items()}
    return Converted([*v2.methods, *prompts.methods], numbers, prompts.notes)


def _v2(source: Source, layout: Layout) -> Converted:
    """The scale and the bias of every linear layer, and the norms."""
    method = LlamaAdapterV2(length=0, head=True)
    numbers: dict[str, Tensor] = {}
    rows: dict[int, int] = {}  # of a layer's fused projection, taken so far
    for block in [*layout.linears, *([] if layout.head is None else [layout.head])]:
        theirs = _their_name(block)
        scale, bias = (source.tensor(f"{theirs}.adapter_{part}", None) for part in ("scale", "bias"))
        if theirs.endswith("attn.qkv") and block.layer is not None:
            start = rows.get(block.layer, 0)
            rows[block.layer] = start + block.output_size
            scale, bias = (one[start : start + block.output_size] for one in (scale, bias))
        numbers |= {f"0.{block.label}.scale": scale, f"0.{block.label}.bias": bias}
    for block in layout.norms:
        theirs = _their_name(block)
        for name, _ in block.module.named_parameters(recurse=False):
            numbers[f"0.{block.label}.norm.{name}"] = source.tensor(f"{theirs}.{name}", None)
    return Converted([method], numbers)


def _their_name(block: Block) -> str:
    """LitGPT's name of a llama's module."""
    name = block.path.rsplit(".", 1)[-1]
    if name not in NAMES:
        raise ForewordError(f"LitGPT's adapter_v2 converts on models of llama's layers; this one has a {block.path}")
    return NAMES[name] if block.layer is None else f"transformer.h.{block.layer}.{NAMES[name]}"


def _gate(source: Source, site: Site) -> Tensor:
    gate = source.tensor(f"transformer.h.{site.layer}.attn.gating_factor", 1, None, None, 1).flatten()
    if len(gate) != site.num_heads:
        raise ForewordError(f"{source.weights} has {len(gate)} gates in layer {site.layer}; the model {site.num_heads}")
    return gate


@torch.no_grad()
def _misread(layout: Layout, site: Site, prompt: Tensor, v2: Mapping[str, Tensor]) -> KeyValue:
    """[Q; K; V] of the prompt (l, (H + 2G)·D), cut as G groups of H/G queries, a key and a value: keys and values."""
    linears = projections(layout, site)
    if len({linear.path for linear in linears.values()}) != len(ROLES):
        raise ForewordError(
            f"{type(site.module).__name__} computes keys and values in one layer; LitGPT's order is lost"
        )
    prompt = prompt.to(site.device, site.dtype)
    made = []
    for block in (linears[role] for role in ROLES):
        states = block.module(prompt)
        if v2:
            scale, bias = (v2[f"0.{block.label}.{part}"].to(states) for part in ("scale", "bias"))
            states = scale * (states + bias)
        made.append(states)
    every = torch.cat(made, dim=-1)
    groups = every.view(len(prompt), site.num_key_value_heads, -1, site.key_dim).transpose(0, 1)  # (G, l, H/G + 2, D)
    return groups[:, :, -2], groups[:, :, -1]
