"""What can ride on the keyword `foreword` into an attention call: a plan, a recorder, or a projection.

    Plan        which adapter each row of the batch reads; the attention call adds the adapters' terms
    Recorder    runs the model as it is and keeps the keys and values that every attention module computed
    Projection  keeps the keys and values of one module and skips its attention

Each has one method, `read`, that gets the original attention function and the arguments of its call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .merge import Scoring, attend, causal_mask

KeyValue = tuple[Tensor, Tensor]  # keys (…, G, l, D_k) and values (…, G, l, D_v)


@dataclass
class Recorder:
    """Run the base model and keep what each attention module computed, in cache space (after RoPE and QK-norm)."""

    calls: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # (B, H | G, T, D) each

    def read(self, original, module, query, key, value, mask, **kwargs):
        self.calls[module] = (query, key, value)
        return original(module, query, key, value, mask, **kwargs)


@dataclass
class Projection:
    """Stop at the projections: keep query (B, H, l, D), key and value (B, G, l, D); answer the attention with zeros."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None

    def read(self, original, module, query, key, value, mask, **kwargs):
        self.query, self.key, self.value = query, key, value
        batch, heads, length, _ = query.shape
        return query.new_zeros(batch, length, heads, value.shape[-1]), None


@dataclass(frozen=True)
class Plan:
    """Which adapter each row of a batch reads.

    Attributes:
        rows: adapter name → indices of its rows, or None for every row. Rows in no entry read the base model.
        shared: adapter name → what each of its parts computed once for this forward (see `foreword.space.Part`).
        memory: what was computed at the first step of a generation, kept for the next ones; None outside of one.
        prompt: (B, T) boolean, the tokens from which a method may compute gates: the prompt, without padding; None: all.
        call: the arguments of the attention module's call by name, for prefixes that read its input.
    """

    rows: dict[str, Tensor | None]
    shared: dict[str, list[Any]] = field(default_factory=dict)
    memory: dict[nn.Module, Any] | None = None
    prompt: Tensor | None = None
    call: dict[str, Any] | None = None

    def remember(self, key: nn.Module, compute: Callable[[], Any]) -> Any:
        """`compute()`, or what it gave earlier in the same generation."""
        if self.memory is None:
            return compute()
        if key not in self.memory:
            self.memory[key] = compute()
        return self.memory[key]

    def read(self, original, module, query, key, value, mask, **kwargs):
        """Token attention by the model's own function, plus the term of every adapter that reads here."""
        slot = getattr(module, "foreword", None)
        readers = [] if slot is None else slot.readers(self)
        if not readers:
            return original(module, query, key, value, mask, **kwargs)

        scoring = Scoring(
            scaling=kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[-1] ** -0.5,
            softcap=kwargs.get("softcap"),
            dropout=kwargs.get("dropout", 0.0),
        )
        weights = None
        if any(reader.prefix.joins_softmax for reader in readers):
            out, lse, weights = _token_segment(module, query, key, value, mask, scoring, kwargs)
        else:
            out, weights = original(module, query, key, value, mask, **kwargs)
            out, lse = out.transpose(1, 2), None  # (B, H, T, D)
        for reader in readers:
            out, lse = reader.add(query, out, lse, scoring)
        return out.transpose(1, 2).contiguous(), weights


def _token_segment(module, query, key, value, mask, scoring, kwargs) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own attention over its tokens, with the lse that its own function keeps to itself."""
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if mask is None and is_causal and query.shape[2] > 1:
        mask = causal_mask(query.shape[2], key.shape[2], query.device)
    bias = kwargs.get("position_bias")  # T5: (1, H, T, S), added to the scores
    if bias is not None:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, bias, torch.finfo(bias.dtype).min)
        else:
            mask = bias if mask is None else bias + mask
    if mask is not None and mask.shape[-1] > key.shape[2]:
        mask = mask[..., : key.shape[2]]
    return attend(query, key, value, scoring, mask, sinks=kwargs.get("s_aux"))
