"""Which linear layer makes an attention's queries, keys and values, found by following gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ForewordError
from .layout import Block, Layout, Site, is_states

ROLES = ("query", "key", "value")


def linears_of(
    layout: Layout, targets: str, method: str, kinds: Sequence[str] = ("self", "cross", "encoder")
) -> list[Block]:
    """The linear layers that `targets` names: "query", "key", "value", "output", "ffn", joined by "+", or "all".

    Of attention, those of the given kinds.

    A fused projection is one layer, named once. Raises `ForewordError` for another name, and where the model has no
    such layers.
    """
    wanted = [*ROLES, "output", "ffn"] if targets == "all" else targets.split("+")
    unknown = [name for name in wanted if name not in (*ROLES, "output", "ffn")]
    if unknown:
        raise ForewordError(
            f"{method}: targets={targets!r}: {unknown[0]!r} is not 'query', 'key', 'value', 'output', 'ffn', a '+' of "
            "them or 'all'"
        )
    found: list[Block] = []
    for site in [site for kind in kinds for site in layout.kinds.get(kind, [])]:
        roles = projections(layout, site) if set(wanted) & set(ROLES) else {}
        found += [roles[role] for role in ROLES if role in wanted]
        if "output" in wanted:
            found += site.output.linears
    if "ffn" in wanted:
        sparse = [ffn for ffn in layout.ffns if not ffn.dense]
        if sparse:
            raise ForewordError(
                f"{method} can't reach every matrix of {type(sparse[0].module).__name__} in layer {sparse[0].layer}: "
                "its experts are no linear layers"
            )
        found += [linear for ffn in layout.ffns for linear in ffn.linears]
    return list(dict.fromkeys(found))


def projections(layout: Layout, site: Site) -> dict[str, Block]:
    """{"query" | "key" | "value": the linear layer that makes it}; the last one, where two stand in a row.

    Found once for each kind of attention module: the others have the same layers by name.
    """
    signature = (type(site.module), tuple(linear.name for linear in site.linears))
    if signature not in layout.traced:
        layout.traced[signature] = _trace(site)
    by_name = {linear.name: linear for linear in site.linears}
    return {role: by_name[name] for role, name in layout.traced[signature].items()}


def _trace(site: Site) -> dict[str, str]:
    outputs: dict[str, Tensor] = {}

    def cut(module: nn.Module, args: tuple, output: Tensor, name: str) -> Tensor:
        outputs[name] = output + torch.zeros_like(output).requires_grad_()  # a node of its own in the graph
        return outputs[name]

    handles = [
        linear.module.register_forward_hook(lambda m, a, o, name=linear.name: cut(m, a, o, name))
        for linear in site.linears
    ]
    try:
        with torch.enable_grad():
            states: dict[str, Any] = {k: v for k, v in site.call.arguments.items() if is_states(v)}
            length = states["hidden_states"].shape[1]
            made = site.run(states, torch.zeros(length, dtype=torch.long, device=site.device))
            found = {}
            for role in ROLES:
                state = getattr(made, role)
                gradients = torch.autograd.grad(
                    state.sum(), list(outputs.values()), allow_unused=True, retain_graph=True
                )
                reached = [name for name, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
                if not reached:
                    raise ForewordError(
                        f"can't find the linear layer that makes the {role} of {type(site.module).__name__}"
                    )
                found[role] = reached[-1]
    finally:
        for handle in handles:
            handle.remove()
    return found
