"""The authors' cartridges: `TrainableCache.save` of github.com/HazyResearch/cartridges.

    trainable_keys, trainable_values   one (1, G, p − f, D) a layer, in cache space
    frozen_keys, frozen_values         one (1, G, f, D) a layer; empty lists where nothing is frozen

Their text positions count on after the cartridge, which stands at 0 … p−1.
"""

from __future__ import annotations

import torch

from ..attention.readers import KeyValue
from ..errors import ForewordError
from ..model.layout import Layout, Site
from .prefixes import prefix
from .source import Converted, Source


def matches(source: Source) -> bool:
    return source.is_pickled and "trainable_keys.0" in source.tensors


def read(source: Source, layout: Layout) -> Converted:
    """What a cartridge is here."""
    if not layout.decoder_only:
        raise ForewordError(f"a cartridge is a decoder's; {type(layout.model).__name__} is none")
    sites = layout.kinds["self"]
    layers = sum(name.startswith("trainable_keys.") for name in source.tensors)
    if layers != len(sites):
        raise ForewordError(f"{source.weights} has {layers} layers of keys; this model has {len(sites)}")
    states: dict[Site, KeyValue] = {}
    frozen = 0
    for layer, site in enumerate(sites):
        pair = []
        for name, width in (("keys", site.key_dim), ("values", site.value_dim)):
            shape = 1, site.num_key_value_heads, None, width
            parts = [source.tensor(f"trainable_{name}.{layer}", *shape)[0]]
            if f"frozen_{name}.{layer}" in source.tensors:
                parts.insert(0, source.tensor(f"frozen_{name}.{layer}", *shape)[0])
                frozen = parts[0].shape[1]
            pair.append(torch.cat(parts, dim=1))
        states[site] = (pair[0], pair[1])
    return prefix(layout, states, text_after=True, frozen_tokens=frozen)
