"""P-tuning v2's released code: a state dict with a prefix encoder among the weights of a BERT or RoBERTa.

    prefix_encoder.embedding.weight       (l, 2·L·d), or (l, d) in front of
    prefix_encoder.trans.0, .2            the two linear layers with `--prefix_projection`

It trains keys and values in the KV cache and a head; text positions count on after the prefix.
"""

from __future__ import annotations

import re

from ..errors import ForewordError
from ..model.layout import Layout
from .prefixes import MlpMap, mapped, prefix, stacked
from .source import Converted, Source

EMBEDDING = "prefix_encoder.embedding.weight"


def matches(source: Source) -> bool:
    return source.has_weights and any(name.endswith(EMBEDDING) for name in source.tensors)


def read(source: Source, layout: Layout) -> Converted:
    """What a checkpoint of P-tuning v2 is here. Its trained head is the model's, not the adapter's."""
    names = [name for name in source.tensors if name.endswith(EMBEDDING)]
    if len(names) != 1:
        raise ForewordError(f"{source.weights} has {len(names)} prefix encoders, where one is expected")
    start = names[0].removesuffix("embedding.weight")
    embedding = source.tensor(names[0], None, None)
    sites = layout.kinds["self"]
    if f"{start}trans.0.weight" in source.tensors:
        down, up = (
            (source.tensor(f"{start}trans.{i}.weight", None, None), source.tensor(f"{start}trans.{i}.bias", None))
            for i in (0, 2)
        )
        converted = mapped(layout, {"self": (sites, MlpMap(embedding, down, up))}, text_after=True)
    else:
        converted = prefix(layout, stacked(embedding, sites), text_after=True)
    head = sorted({name.split(".")[0] for name in source.tensors if re.match(r"(classifier|qa_outputs|cls)\.", name)})
    if head:
        converted.notes.append(
            f"the trained head ({', '.join(head)}) is no part of the adapter: load it into the model"
        )
    return converted
