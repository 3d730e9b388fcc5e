"""Prefixes of other libraries, as keys and values or as a map that makes them, in this library's conventions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..attention.readers import KeyValue
from ..combines import Joint
from ..errors import ForewordError
from ..methods.prefix_tuning import PrefixTuning
from ..model.layout import Layout, Site
from ..sources import Direct, Mlp
from ..space import Point
from .rotation import rotate
from .source import Converted


def stacked(flat: Tensor, sites: list[Site]) -> dict[Site, KeyValue]:
    """Keys and values (G, l, D) of each site out of (l, 2·L·G·D): the key of layer 0, its value, the key of layer 1, …

    The layout of Li & Liang, which PEFT, AdapterHub, P-tuning v2 and He et al. share. Raises `ForewordError` where the
    model's layers need another number of numbers.
    """
    sizes = [site.num_key_value_heads * dim for site in sites for dim in (site.key_dim, site.value_dim)]
    if flat.shape[-1] != sum(sizes):
        raise ForewordError(
            f"the prefix has {flat.shape[-1]} numbers a token; {len(sites)} layers of this model's "
            f"{sites[0].kind} attention need {sum(sizes)}"
        )
    pieces = [
        piece.view(len(flat), site.num_key_value_heads, -1).transpose(0, 1)
        for piece, site in zip(flat.split(sizes, dim=-1), [site for site in sites for _ in range(2)], strict=True)
    ]
    return {site: (pieces[2 * i], pieces[2 * i + 1]) for i, site in enumerate(sites)}


def flat(states: dict[Site, KeyValue]) -> Tensor:
    """The inverse of `stacked`: (l, 2·L·G·D)."""
    return torch.cat([state.transpose(0, 1).flatten(1) for pair in states.values() for state in pair], dim=-1)


@dataclass(frozen=True)
class MlpMap:
    """tanh(E W_1 + b_1) W_2 + b_2 → (l, 2·L·G·D): a prefix's training form.

    Attributes:
        embedding: E (l, d).
        down, up: weight (out, in) and bias (out,) of the two linear layers.
    """

    embedding: Tensor
    down: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        return linear(torch.tanh(linear(self.embedding, *self.down)), *self.up)


def mapped(layout: Layout, maps: dict[str, tuple[list[Site], MlpMap]], *, text_after: bool) -> Converted:
    """A prefix whose keys and values come through a map for each kind of attention.

    It stays one that can be trained further, but where keys must be rotated to this library's positions: then the map
    is evaluated.
    """
    states: dict[Site, KeyValue] = {}
    numbers: dict[str, Tensor] = {}
    for kind, (sites, one) in maps.items():
        states |= stacked(one(), sites)
        numbers[f"0.shared.maps.{kind}.embedding"] = one.embedding
        for name, (weight, bias) in {"down": one.down, "up": one.up}.items():
            numbers |= {f"0.shared.maps.{kind}.{name}.weight": weight, f"0.shared.maps.{kind}.{name}.bias": bias}
    if text_after and layout.rotates:
        converted = prefix(layout, states, text_after=True)
        converted.notes.append("the reparameterisation is evaluated: its keys are rotated to this library's positions")
        return converted
    free = prefix_method(layout, states, text_after)
    [hidden] = {len(one.down[0]) for _, one in maps.values()}
    if isinstance(free, PrefixTuning):
        return Converted([replace(free, reparam="shared", hidden=hidden)], numbers)
    return Converted([replace(free, source=Mlp(free.source.length, hidden))], numbers)


def prefix(layout: Layout, states: dict[Site, KeyValue], *, text_after: bool, frozen_tokens: int = 0) -> Converted:
    """A prefix of free keys and values.

    Args:
        states: keys and values (G, l, D) of each site as the other library adds them to its cache.
        text_after: whether the other library's text positions count on after the prefix (SHIFT).
        frozen_tokens: the first tokens that training leaves as they are.
    """
    method = prefix_method(layout, states, text_after, frozen_tokens)
    numbers: dict[str, Tensor] = {}
    for site, (key, value) in states.items():
        if text_after:
            key = rotate(site, key, -key.shape[1])
        for name, state in (("key", key), ("value", value)):
            numbers[f"0.{site.label}.source.{name}"] = state[:, frozen_tokens:].contiguous()
            if frozen_tokens:
                numbers[f"0.{site.label}.source.frozen_{name}"] = state[:, :frozen_tokens].contiguous()
    return Converted([method], numbers)


def prefix_method(
    layout: Layout, states: dict[Site, KeyValue], text_after: bool, frozen_tokens: int = 0
) -> PrefixTuning | Point:
    """prefix-tuning, or the point beside it whose text positions are counted as the other library counts them."""
    sites = list(states)
    [length] = {key.shape[1] for key, _ in states.values()}
    kinds = list(dict.fromkeys(site.kind for site in sites))
    every = [site for kind in kinds for site in layout.kinds[kind]]
    layers = None if len(sites) == len(every) else tuple(dict.fromkeys(site.layer for site in sites))
    attention = "all" if set(kinds) == set(layout.kinds) else "+".join(kinds)
    usual = layout.absolute_positions
    moves = text_after and not layout.rotates and (usual or layout.position_embedding is not None)
    if moves == usual:
        return PrefixTuning(length=length, layers=layers, attention=attention, frozen_tokens=frozen_tokens)
    where: Literal["after", "own"] = "after" if moves else "own"
    return Point(Direct(length, "text", frozen_tokens), Joint(), layers, attention, text_positions=where)
