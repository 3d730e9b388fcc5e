"""LitGPT's adapters: `lit_model.pth.adapter` and `.adapter_v2`.

    transformer.h.<i>.attn.adapter_wte.weight   (l, d), in the layers from `adapter_start_layer` on
    transformer.h.<i>.attn.gating_factor        (1, 1, H, 1), a factor without tanh; (1, H, 1, 1) in older files
    …<linear>.adapter_scale, .adapter_bias      v2: s ⊙ (W x + b)
    …norm_1, norm_2, ln_f                       v2: trained norms

LitGPT stores the projections of queries, keys and values one after the other, but cuts what they make of the prompt
as if those of each group of heads stood together (so does 0.5.13). Its prompts therefore read other rows than W_k and
W_v; `fused="grouped"` is for files of versions that stored them so.
"""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import Tensor

from ..attention.readers import KeyValue
from ..errors import ForewordError
from ..model.layout import Layout, Site
from ..model.projections import ROLES, projections
from .gated import gated, gated_states
from .source import Converted, Source

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
    if any(name.endswith("adapter_scale") for name in source.tensors):
        raise ForewordError(
            f"{source.weights} is an adapter_v2: it scales the output head and reads its prompts through scaled "
            "projections, which no method here does; only `adapter` converts"
        )
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
    if fused == "grouped":
        return gated(layout, sites, prompts, gates, tanh=False)
    states = {site: _misread(layout, site, prompt) for site, prompt in zip(sites, prompts, strict=True)}
    return gated_states(
        layout, states, gates, ["LitGPT's prompts read mixed rows of its fused projection: stored as keys and values"]
    )


def _gate(source: Source, site: Site) -> Tensor:
    gate = source.tensor(f"transformer.h.{site.layer}.attn.gating_factor", 1, None, None, 1).flatten()
    if len(gate) != site.num_heads:
        raise ForewordError(f"{source.weights} has {len(gate)} gates in layer {site.layer}; the model {site.num_heads}")
    return gate


@torch.no_grad()
def _misread(layout: Layout, site: Site, prompt: Tensor) -> KeyValue:
    """[Q; K; V] of the prompt (l, (H + 2G)·D), cut as G groups of H/G queries, a key and a value: keys and values."""
    linears = projections(layout, site)
    if len({linear.path for linear in linears.values()}) != len(ROLES):
        raise ForewordError(
            f"{type(site.module).__name__} computes keys and values in one layer; LitGPT's order is lost"
        )
    prompt = prompt.to(site.device, site.dtype)
    every = torch.cat([linears[role].module(prompt) for role in ROLES], dim=-1)
    groups = every.view(len(prompt), site.num_key_value_heads, -1, site.key_dim).transpose(0, 1)  # (G, l, H/G + 2, D)
    return groups[:, :, -2], groups[:, :, -1]
