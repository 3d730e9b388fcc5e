"""Keys of one position convention as keys of another: R_s K for a model's own rotary embedding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ForewordError
from ..model.layout import Site, call_rotary, is_table


@torch.no_grad()
def rotate(site: Site, key: Tensor, by: int) -> Tensor:
    """R_by K for keys (G, l, D) in cache space: what they would be `by` positions later.

    A prefix that was trained in front of its text (SHIFT: text position l + t) is read here before position 0
    (NOSHIFT: text position t) with the keys R_{−l} K, exactly. Keys stay where a model does not rotate them, or looks
    its rotations up, so that text stands behind the prefix here too.

    Models differ in which entries of a key form a pair, and in how they lay out cosines; the layout that reproduces
    the model's own keys at that position is taken. Raises `ForewordError` where none does.
    """
    if site.rotary is None or by == 0 or is_table(site.rotary):
        return key
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, site.hidden_size, generator=generator).to(site.device, site.dtype)
    here, there = (
        site.project(hidden, torch.full((4,), position, device=site.device), norm=False)[0].double()
        for position in (0, by)
    )
    tolerance = 200 * torch.finfo(site.dtype).eps * here.abs().max()
    for turn in _turns(site, by):
        if (turn(here) - there).abs().max() < tolerance:
            return turn(key.double().to(site.device)).to(key)
    raise ForewordError(
        f"can't move the keys of {type(site.module).__name__} in layer {site.layer} to another position: its rotary "
        "embedding is none of the known layouts"
    )


def _turns(site: Site, by: int) -> Iterator[Turn]:
    """The rotations by `by` positions that the model's cosines and sines may mean."""
    assert site.rotary is not None
    embeddings = call_rotary(site.rotary, torch.zeros(1, 1, site.hidden_size), torch.tensor([[by]], device=site.device))
    if not isinstance(embeddings, tuple) or len(embeddings) != 2 or any(e.is_complex() for e in embeddings):
        return
    cos, sin = (embedding.flatten().double() for embedding in embeddings)
    size = (cos**2 + sin**2).sqrt()  # some scale both; the keys are scaled already
    cos, sin, width = cos / size, sin / size, len(cos)
    angles = [(cos[: width // 2], sin[: width // 2]), (cos[::2], sin[::2]), (cos, sin)]
    for (c, s), interleaved, at_end in itertools.product(angles, (False, True), (False, True)):
        if 2 * len(c) <= site.key_dim:
            yield Turn(c, s, interleaved, at_end)


class Turn:
    """Rotate pairs (a, b) of a key's entries: (a cos − b sin, a sin + b cos).

    Args:
        cos, sin: of each pair.
        interleaved: pairs are neighbours, rather than an entry of each half.
        at_end: the rotated entries are the last ones, rather than the first.
    """

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool, at_end: bool) -> None:
        self.cos, self.sin, self.interleaved, self.at_end = cos, sin, interleaved, at_end

    def __call__(self, key: Tensor) -> Tensor:
        """key (…, D) in float64."""
        width = 2 * len(self.cos)
        start = key.shape[-1] - width if self.at_end else 0
        before, rotated, after = key.split([start, width, key.shape[-1] - start - width], dim=-1)
        pairs = rotated.unflatten(-1, (-1, 2)) if self.interleaved else rotated.unflatten(-1, (2, -1)).mT
        a, b = pairs.unbind(-1)
        turned = torch.stack([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)
        turned = turned if self.interleaved else turned.mT
        return torch.cat([before, turned.flatten(-2), after], dim=-1)
