"""A prefix as a plain KV cache, for runtimes that know nothing of prefixes: what they hold after reading l tokens.

    kv_cache.safetensors    key.<layer> (1, G, l, D_k) and value.<layer> (1, G, l, D_v) in cache space, and metadata:
                            length (l), frozen_tokens, and the base's name

Text positions go on behind the prefix: the first token of the text stands at position l.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

from ..attention.readers import KeyValue
from ..errors import ForewordError
from ..files import atomic_path
from ..methods import Cartridge, PrefixTuning
from ..model.adapter import Adapter
from ..model.layout import Layout, Site
from ..model.slot import Prefix
from .prefixes import prefix
from .rotation import rotate
from .source import Converted, Source

FILE = "kv_cache.safetensors"


def to_cache(adapter: Adapter) -> DynamicCache:
    """The adapter's prefix as the KV cache (`past_key_values`) of one row, in the model's dtype.

    With it the base computes what it computes with the adapter, for text at positions l, l + 1, ….

    Example:
        cache = to_cache(fw.load(model, "out/manual"))
        fw.set_active(model, None)
        model(ids, cache=cache)

    Raises:
        ForewordError: the adapter is something else than prefixes in the softmax of every layer of a decoder, or the
            model's sliding window would lose them.
    """
    states = states_of(adapter)
    if getattr(adapter.model.config.get_text_config(), "sliding_window", None):
        raise ForewordError(
            "the model's cache has a sliding window, which a prefix in it would leave; an adapter doesn't"
        )
    cache = DynamicCache(config=adapter.model.config)
    for site, pair in states.items():
        key, value = (state[None].to(site.device, site.dtype) for state in pair)
        cache.update(key, value, site.layer)
    return cache


@torch.no_grad()
def states_of(adapter: Adapter) -> dict[Site, KeyValue]:
    """Keys (G, l, D_k) and values (G, l, D_v) of each layer, at positions in front of text that begins at l.

    Of several prefixes, as `foreword.join` puts them together, the keys stand side by side. Raises as `to_cache`.
    """
    layout = adapter.host.layout
    every = layout.kinds.get("self", [])
    for part in adapter.parts:
        prefixes = all(isinstance(module, Prefix) and module.joins_softmax for module in part.modules.values())
        if not prefixes or not layout.decoder_only or list(part.modules) != every:
            raise ForewordError(
                "a KV cache can hold prefixes in the softmax of every layer of a decoder; "
                f"{part.method.name} is more, or less"
            )
        if layout.absolute_positions and not part.shift:
            raise ForewordError("in a KV cache text positions go on behind the prefix; this one's text has its own")
    if layout.stateful or len({site.rotary is None for site in every}) > 1:
        raise ForewordError(f"{type(layout.model).__name__} keeps more than keys and values at one kind of position")
    kept = DynamicCache(config=layout.model.config)
    layout.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=layout.model.device), cache=kept, use_cache=True)
    for site, layer in zip(every, kept.layers, strict=True):
        if (layer.keys.shape[1], layer.keys.shape[3]) != (site.num_key_value_heads, site.key_dim):
            raise ForewordError(f"{type(layout.model).__name__} keeps something else in its cache than keys and values")
    shared = [None if part.shared is None else part.shared() for part in adapter.parts]
    states: dict[Site, KeyValue] = {}
    for site in every:
        pairs = [part.modules[site].source(site, own) for part, own in zip(adapter.parts, shared, strict=True)]
        key, value = (torch.cat(state, dim=1) for state in zip(*pairs, strict=True))
        states[site] = (rotate(site, key, key.shape[1]), value)
    return states


# ---------------------------------------------------------------------------------------------------------------------
# The file, for `foreword convert`


def matches(source: Source) -> bool:
    """Whether the numbers are those of a KV cache."""
    if not source.has_weights or source.is_pickled:
        return False
    return bool(source.tensors) and all(re.fullmatch(r"(key|value)\.\d+", name) for name in source.tensors)


def read(source: Source, layout: Layout) -> Converted:
    """The cache as a cartridge, whose first tokens stay frozen where the file says so."""
    with safe_open(source.weights, framework="pt") as file:
        told: dict[str, str] = file.metadata() or {}
    sites = layout.kinds.get("self", [])
    if not layout.decoder_only:
        raise ForewordError(f"a KV cache is of a causal decoder; {type(layout.model).__name__} is not one")
    length = source.tensors["key.0"].shape[-2] if "key.0" in source.tensors else 0
    states = {
        site: (
            source.tensor(f"key.{site.layer}", 1, site.num_key_value_heads, length, site.key_dim)[0],
            source.tensor(f"value.{site.layer}", 1, site.num_key_value_heads, length, site.value_dim)[0],
        )
        for site in sites
    }
    frozen = int(told.get("frozen_tokens", 0))
    converted = prefix(layout, states, text_after=True, frozen_tokens=frozen)
    if all(isinstance(method, PrefixTuning) for method in converted.methods):
        converted.methods = [Cartridge(length, frozen)]
    return converted


def write(adapter: Adapter, folder: Path) -> list[str]:
    """Write the cache to a folder, in fp32, or float64 beside a float64 model."""
    states = states_of(adapter)
    tensors: dict[str, Tensor] = {}
    for site, (key, value) in states.items():
        tensors[f"key.{site.layer}"] = key[None].cpu().contiguous()
        tensors[f"value.{site.layer}"] = value[None].cpu().contiguous()
    sources: list[Any] = [next(iter(part.modules.values())).source for part in adapter.parts]
    told = {
        "length": str(tensors["key.0"].shape[2]),
        "frozen_tokens": str(getattr(sources[0], "frozen_tokens", 0)),
        "model": str(adapter.model.config.name_or_path),
    }
    with atomic_path(folder / FILE) as temporary:
        save_file(tensors, temporary, metadata=told)
    notes = []
    if len(adapter.parts) > 1:
        notes.append("the joined prefixes are one in the cache")
    if getattr(adapter.model.config.get_text_config(), "sliding_window", None):
        notes.append("in a cache the prefix leaves the sliding window of this model; in an adapter it never does")
    return notes
