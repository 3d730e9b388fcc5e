"""Cartridges: a prefix that stands in for a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..combines import Joint
from ..errors import ForewordError
from ..model.layout import Layout
from ..model.part import Part
from ..sources import Direct
from ..sources.text import Start
from ..space import Count, Method, Point, register, require_positive
from .prefix_tuning import count_key_values


@register
@dataclass(frozen=True)
class Cartridge(Method):
    """Keys and values of a document's text, compressed by training into p tokens of every layer.

        head_h = softmax(q_h [P_k; K]ᵀ/√D) [P_v; V],  P = the KV of p real tokens at the start

    At step 0 it is those tokens in the context. Training (`foreword compress`) makes the model behind it answer as the
    model with the document in its context does. The first tokens stay as they are: attention that has nowhere to go
    rests on the first of a text. Trainable: 2·L·(p − frozen)·d_kv; stored: 2·L·p·d_kv.

    Use it where many questions are asked about one document.

    Args:
        length: p, tokens that the document is compressed to.
        frozen_tokens: first tokens that are not trained; 1 keeps an attention sink.
    """

    name: ClassVar[str] = "cartridge"
    learning_rate: ClassVar[float] = 2e-2
    citation: ClassVar[str] = (
        "Eyuboglu et al., Cartridges: Lightweight and general-purpose long context representations via self-study, 2025"
    )
    size: ClassVar[str | None] = "length"

    length: int = 128
    frozen_tokens: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "length")
        frozen = self.frozen_tokens
        if isinstance(frozen, bool) or not isinstance(frozen, int) or not 0 <= frozen <= self.length:
            raise ForewordError(f"Cartridge: frozen_tokens must be from 0 to length, not {frozen!r}")

    def build(self, layout: Layout, start: Start) -> Part:
        require_decoder(layout)
        return super().build(layout, start)

    @property
    def least_size(self) -> int:
        return 1 + self.frozen_tokens

    def point(self) -> Point:
        return Point(Direct(self.length, "text", self.frozen_tokens), Joint(), attention="self")

    def count(self, layout: Layout) -> Count:
        sites = layout.select(None, "self")
        stored = count_key_values(sites, self.length, None, 0).stored
        return Count(stored - count_key_values(sites, self.frozen_tokens, None, 0).stored, stored)


def require_decoder(layout: Layout) -> None:
    """Raise `ForewordError` for a model that no text can stand in front of."""
    if not layout.decoder_only:
        raise ForewordError(
            f"a cartridge stands for text in front of a causal decoder's; {type(layout.model).__name__} is not one"
        )
