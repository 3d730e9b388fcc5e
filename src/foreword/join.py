"""Adapters side by side in one: every row that reads it reads them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .errors import ForewordError
from .model.adapter import Adapter
from .model.attach import place
from .model.host import host_with
from .sources.text import Blank


@torch.no_grad()
def join(model: PreTrainedModel, names: Sequence[str], name: str) -> Adapter:
    """A new adapter on the model, active, that has copies of everything that the adapters `names` have.

    The keys of two prefixes stand side by side in one softmax; each was made as if its text stood right before the
    user's, so their positions overlap. Of two cartridges a model then reads both documents (Eyuboglu et al. 2025).

    Example:
        both = fw.join(model, ["rome", "greece"], name="both")
        with fw.rows(model, ["rome", "both"]):
            model.generate(**prompts)

    Args:
        model: with the adapters, at least two.
        names: of the adapters, in this order.
        name: of the new one.

    Raises:
        ForewordError: there is no such adapter, some are folded and others not, or two claim the same place.
    """
    if len(names) < 2:
        raise ForewordError(f"join needs at least two adapters, not {len(names)}")
    adapters = [host_with(model, one).require(one) for one in names]
    if len({adapter.folded for adapter in adapters}) > 1:
        unfolded = next(adapter.name for adapter in adapters if not adapter.folded)
        raise ForewordError(f"adapter {unfolded!r} is not folded, and others are: call its fold() first")
    host = adapters[0].host
    methods = [method for adapter in adapters for method in adapter.methods]
    joined = place(host, methods, name, Blank(model, host.layout))
    if adapters[0].folded:
        joined.fold()
    parts = [part for adapter in adapters for part in adapter.parts]
    for target, source in zip(joined.parts, parts, strict=True):
        numbers = source.state_dict()
        for key, tensor in target.state_dict().items():
            tensor.copy_(numbers[key])
    return joined
