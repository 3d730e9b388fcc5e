"""LLaMA-Adapter v1 and the non-linear fork: what their extraction script takes out of a training checkpoint, or all.

    adapter_query.weight            (L_a·l, d)   linear prompts; (L_a·l, 256) codes of the fork's `deepshare`
    layers.<i>.attention.gate       (1, H, 1, 1) of every layer; those of the top L_a are used
    hyperAdapter.layer_embed.weight (N, 64)      codes of the fork's `hypermodel`
    hyperAdapter.[decoder.]linear1, .prompt      its two linear layers; linear1 is absent with hidden_dim 0

Their LLaMA is Meta's: its rotary embedding pairs neighbours. transformers' LLaMA pairs halves and permutes W_q and W_k
for that, so prompts, which go through W_k without rotation, and gates, one a head, are the same numbers there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, leaky_relu, linear

from ..errors import ForewordError
from ..methods.zero_init import ZeroInitNonlinear
from ..model.layout import Layout, Site
from .gated import gated
from .source import Converted, Source

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": lambda x: leaky_relu(x, 0.1),
    "gelu": gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
QUERY, EMBED = "adapter_query.weight", "hyperAdapter.layer_embed.weight"
DEEPSHARE = 256  # width of its codes


def matches(source: Source) -> bool:
    return source.is_pickled and (QUERY in source.tensors or EMBED in source.tensors)


def read(
    source: Source,
    layout: Layout,
    gate: Literal["tanh", "raw", "none"] = "tanh",
    activation: str = "relu",
    length: int = 10,
) -> Converted:
    """What a checkpoint of LLaMA-Adapter, or of the non-linear fork, is here.

    Args:
        gate: "tanh" as in training and in the paper; "raw" for the outputs of the released inference code, which
            leaves the tanh out; "none" for the fork's `--random_init` baseline.
        activation: of the fork's prompt network.
        length: l, prompt tokens of a layer (`adapter_len`). Neither is in the file.
    """
    if gate not in ("tanh", "raw", "none"):
        raise ForewordError(f"gate must be 'tanh', 'raw' or 'none', not {gate!r}")
    if activation not in ACTIVATIONS:
        raise ForewordError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    gates = _gates(source, layout)
    first: Linear | None = None
    last: Linear | None = None
    every, width = layout.kinds["self"], layout.sites[0].hidden_size
    if EMBED in source.tensors:
        form, (first, last) = "hypermodel", _network(source, "hyperAdapter.decoder")
        codes = source.tensor(EMBED, len(every), None)
        if gate == "none":
            raise ForewordError(
                f"{source.weights} does not say how many layers read a hypermodel's prompts without gates"
            )
        adapted = len(every) - _lowest_open(gates)
        length = len(last[1]) // width
        used = codes[-adapted:]
    else:
        deep = "hyperAdapter.prompt.weight" in source.tensors
        form, (first, last) = "deepshare", _network(source, "hyperAdapter") if deep else (None, None)
        query = source.tensor(QUERY, None, DEEPSHARE if deep else width)
        adapted = _adapted(source, len(query), length, gates)
        codes = used = query.view(adapted, length, -1)  # (L_a, l, d | 256)
    sites, gates = every[-adapted:], gates[-adapted:]
    if last is not None and first is not None and activation == "relu" and gate == "tanh":
        return _nonlinear(layout, sites, gates, form, codes, length, first, last)
    if last is not None:
        used = _evaluate(used, first, last, ACTIVATIONS[activation])
    prompts = used.reshape(adapted, length, width)
    return gated(layout, sites, list(prompts), None if gate == "none" else gates, tanh=gate == "tanh")


Linear = tuple[Tensor, Tensor]  # weight (out, in) and bias (out,)


def _gates(source: Source, layout: Layout) -> list[Tensor]:
    """The gate (H,) of every layer."""
    found = [name for name in source.tensors if re.fullmatch(r"layers\.\d+\.attention\.gate", name)]
    sites = layout.kinds["self"]
    if len(found) != len(sites):
        raise ForewordError(f"{source.weights} has gates of {len(found)} layers; this model has {len(sites)} layers")
    gates = []
    for layer, site in enumerate(sites):
        name = f"layers.{layer}.attention.gate"
        if name in found and source.tensors[name].dim() == 4 and source.tensors[name].shape[2] > 1:
            raise ForewordError(f"{source.weights} has gates that read the query (typ_gate=adapt); no method has them")
        gates.append(source.tensor(name, 1, site.num_heads, 1, 1).flatten())
    return gates


def _lowest_open(gates: list[Tensor]) -> int:
    """The lowest layer that has a gate that is not 0; training leaves those below the adapted layers at 0."""
    return next((layer for layer, gate in enumerate(gates) if gate.any()), 0)


def _adapted(source: Source, rows: int, length: int, gates: list[Tensor]) -> int:
    """L_a, of the L_a·l rows of the prompts."""
    adapted = rows // length if length > 0 else 0
    if adapted * length != rows or not 1 <= adapted <= len(gates):
        raise ForewordError(f"{source.weights} has {rows} prompt rows: not {length} for some of {len(gates)} layers")
    if any(gate.any() for gate in gates[:-adapted]):
        raise ForewordError(
            f"{source.weights} has {rows} prompt rows and its lowest open gate in layer {_lowest_open(gates)}: "
            f"they can't be {length} a layer; give the length"
        )
    return adapted


def _network(source: Source, name: str) -> tuple[Linear | None, Linear]:
    """The prompt network: its first linear layer, None where it has one only, and its last."""
    last = source.tensor(f"{name}.prompt.weight", None, None), source.tensor(f"{name}.prompt.bias", None)
    if f"{name}.linear1.weight" not in source.tensors:
        return None, last
    return (source.tensor(f"{name}.linear1.weight", None, None), source.tensor(f"{name}.linear1.bias", None)), last


def _evaluate(codes: Tensor, first: Linear | None, last: Linear, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """σ(c U + u) W + b, or σ(c W + b) where there is no U."""
    if first is None:
        return activation(linear(codes, *last))
    return linear(activation(linear(codes, *first)), *last)


def _nonlinear(
    layout: Layout,
    sites: list[Site],
    gates: list[Tensor],
    form: Any,
    codes: Tensor,
    length: int,
    first: Linear,
    last: Linear,
) -> Converted:
    layers = None if len(sites) == len(layout.kinds["self"]) else tuple(site.layer for site in sites)
    numbers = {"0.shared.codes": codes}
    for name, (weight, bias) in {"down": first, "up": last}.items():
        numbers |= {f"0.shared.{name}.weight": weight, f"0.shared.{name}.bias": bias}
    numbers |= {f"0.{site.label}.combine.gate": gate for site, gate in zip(sites, gates, strict=True)}
    return Converted([ZeroInitNonlinear(length, layers, form=form, hidden=len(first[0]))], numbers)
