"""Zero-initialised attention of other libraries: prompts through the frozen projections, behind a gate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.readers import KeyValue
from ..combines import ZeroGate
from ..methods.zero_init import RandomInit, ZeroInit
from ..model.layout import Layout, Site
from ..sources import Direct
from ..sources.projected import project_prompt
from ..space import Point
from .source import Converted

OPEN = 0.5  # tanh of the gate in front of values that carry a factor above 1


def gated(
    layout: Layout, sites: list[Site], prompts: Sequence[Tensor], gates: Sequence[Tensor] | None, tanh: bool
) -> Converted:
    """Prompts (l, d) of each site with their gates.

    Args:
        prompts: one a site, in the order of `sites`.
        gates: (H,) or (1,) of each site; None for prompts in the tokens' own softmax, without a gate.
        tanh: whether the other library multiplies by tanh(g); otherwise by g itself. A factor g of a size below 1 is
            stored as atanh(g); for a larger one the keys and values are stored instead of the prompt, the values
            times what tanh can't reach.
    """
    layers = _layers(layout, sites)
    length = prompts[0].shape[0]
    named = {f"0.{site.label}.source.prompt": prompt for site, prompt in zip(sites, prompts, strict=True)}
    if gates is None:
        return Converted([RandomInit(length, layers)], named)
    wide = [gate.flatten().expand(site.num_heads) for site, gate in zip(sites, gates, strict=True)]
    if tanh or all(gate.abs().max() < 1 for gate in wide):
        stored = wide if tanh else [gate.double().atanh().to(gate.dtype) for gate in wide]
        return Converted([ZeroInit(length, layers)], named | _gates(sites, stored))
    with torch.no_grad():
        states = {site: project_prompt(site, one.to(site.device)) for site, one in zip(sites, prompts, strict=True)}
    return gated_states(
        layout, states, gates, ["a gate is 1 or more, which no tanh reaches: keys and values are stored"]
    )


def gated_states(
    layout: Layout, states: dict[Site, KeyValue], gates: Sequence[Tensor], notes: Sequence[str] = ()
) -> Converted:
    """Keys and values (G, l, D) of each site behind factors (H,) or (1,), which may be larger than tanh reaches.

    The values carry max|g| / OPEN, and the gates make up for it.
    """
    numbers: dict[str, Tensor] = {}
    stored = []
    for (site, (key, value)), gate in zip(states.items(), gates, strict=True):
        factor = (gate.abs().max() / OPEN).clamp(min=1e-6)
        numbers[f"0.{site.label}.source.key"] = key
        numbers[f"0.{site.label}.source.value"] = value * factor.to(value)
        stored.append((gate.flatten().expand(site.num_heads) / factor).atanh())
    sites = list(states)
    length = next(iter(states.values()))[0].shape[1]
    method = Point(Direct(length), ZeroGate(), _layers(layout, sites), "self")
    return Converted([method], numbers | _gates(sites, stored), list(notes))


def _layers(layout: Layout, sites: list[Site]) -> tuple[int, ...] | None:
    return None if len(sites) == len(layout.kinds["self"]) else tuple(site.layer for site in sites)


def _gates(sites: list[Site], gates: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"0.{site.label}.combine.gate": gate for site, gate in zip(sites, gates, strict=True)}
