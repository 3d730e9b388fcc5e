"""What can ride on the keyword `foreword` into an attention call: a plan, a recorder, or a projection.

    Plan        which adapter each row of the batch reads; the attention call adds the adapters' terms
    Recorder    runs the model as it is and keeps the keys and values that every attention module computed
    Projection  keeps the keys and values of one module and skips its attention

Each has one method, `read`, that gets the original attention function and the arguments of its call.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .fused import joint_attention, prefix_attention, token_attention
from .kernels import FlashCPU, is_fused
from .masks import implementation, token_mask
from .merge import Scoring, attend, causal_mask

logger = logging.getLogger("foreword")

KeyValue = tuple[Tensor, Tensor]  # keys (…, G, l, D_k) and values (…, G, l, D_v)


class Recorder:
    """Run the base model and keep what each attention module computed, in cache space (after RoPE and QK-norm).

    No dataclass: FSDP2 copies those on their way through a call, and what a copy keeps is lost.
    """

    def __init__(self) -> None:
        self.calls: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = {}  # (B, H | G, T, D) each

    def read(self, original, module, query, key, value, mask, **kwargs):
        self.calls[module] = (query, key, value)
        return original(module, query, key, value, mask, **kwargs)


class Projection:
    """Stop at the projections: keep query (B, H, l, D), key and value (B, G, l, D); answer the attention with zeros."""

    query: Tensor
    key: Tensor
    value: Tensor

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
        prompt: (B, T) boolean, the tokens from which a method may compute gates: the prompt, no padding; None: all.
        call: the arguments of the attention module's call by name, for prefixes that read its input.
        streams: which rows are parallel streams of one (see `foreword.model.streams`); None where none are.
    """

    rows: dict[str, Tensor | None]
    shared: dict[str, list[Any]] = field(default_factory=dict)
    memory: dict[Hashable, Any] | None = None
    prompt: Tensor | None = None
    call: dict[str, Any] | None = None
    streams: Any = None

    def reads_only(self, name: str | None) -> bool:
        """Whether every row reads the adapter `name`."""
        return name in self.rows and self.rows[name] is None

    def remember(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """`compute()`, or what it gave earlier in the same generation."""
        if self.memory is None:
            return compute()
        if key not in self.memory:
            self.memory[key] = compute()
        return self.memory[key]

    def read(self, original, module, query, key, value, mask, **kwargs):
        """Token attention by the model's own function, plus the term of every adapter that reads here."""
        slot = getattr(module, "foreword", None)
        reads = None if slot is None else slot.reads(self)
        if reads is None or not reads.prefixes:
            return original(module, query, key, value, mask, **kwargs)
        if reads.decided_for is not original:
            reads.segments = _segments(reads, module, query, key, value, kwargs)
            reads.decided_for = original
        if reads.segments is not None:
            return self._read_fused(reads, reads.segments, original, module, query, key, value, mask, kwargs)

        readers = reads.readers(self)
        scoring = Scoring(_scaling(query, kwargs), kwargs.get("softcap"), kwargs.get("dropout", 0.0))
        weights = None
        if reads.joins_softmax:
            out, lse, weights = _token_segment(module, query, key, value, mask, scoring, kwargs)
        else:
            out, weights = original(module, query, key, value, mask, **kwargs)
            out, lse = out.transpose(1, 2), None  # (B, H, T, D)
        for reader in readers:
            out, lse = reader.add(query, out, lse, scoring)
        return out.transpose(1, 2).contiguous(), weights

    def _read_fused(self, reads, segments, original, module, query, key, value, mask, kwargs):
        """The same with a fused kernel for each softmax, and one call for the prefixes of all rows."""
        scaling = _scaling(query, kwargs)
        weights, prefix = None, segments.joint
        if prefix is None and _trains_slowly(reads, module, query, key, kwargs):
            mask, causal = token_mask(module, query, key, mask, kwargs)
            out = token_attention(query, key, value, scaling, mask=mask, causal=causal)
        elif prefix is None:
            out, weights = original(module, query, key, value, mask, **kwargs)  # (B, T, H, D)
        else:
            mask, causal = token_mask(module, query, key, mask, kwargs)
            out = joint_attention(
                query, key, value, prefix.key, prefix.value, scaling, mask=mask, causal=causal, visible=prefix.visible
            )
        for prefix in segments.apart:
            out = out + prefix_attention(query, prefix.key, prefix.value, scaling, visible=prefix.visible)
        for reader in reads.others(self):
            added, _ = reader.add(query, out.transpose(1, 2), None, Scoring(scaling))
            out = added.transpose(1, 2).contiguous()
        return out, weights


def _scaling(query: Tensor, kwargs: dict[str, Any]) -> float:
    scaling = kwargs.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _segments(reads, module, query, key, value, kwargs):
    """The prefixes of a call put together for fused kernels; None where the reference path has to read them."""
    obstacle = _obstacle(reads, module, query, key, value, kwargs)
    segments = None if obstacle else reads.together(len(query))
    if segments is None:
        obstacle = obstacle or "the prefixes are too long to copy them for each row"
    elif reads.alone:
        kinds = {type(getattr(prefix, "combine", prefix)).__name__ for prefix, _, _ in reads.alone}
        obstacle = f"no kernel reads {', '.join(sorted(kinds))}"
    _note(module, obstacle)
    return segments


def _obstacle(reads, module, query, key, value, kwargs) -> str | None:
    """Why fused kernels can't read the prefixes of a call; None where they can."""
    device, dtype, site = query.device.type, query.dtype, reads.site
    if kwargs.get("softcap") is not None:
        return "the scores are soft-capped"
    if kwargs.get("dropout", 0.0) > 0:
        return "attention weights are dropped in training"
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif not dtype == key.dtype == value.dtype == site.dtype:
        return f"queries are {dtype}, keys {key.dtype}, values {value.dtype} and prefixes {site.dtype}"
    if query.shape[-1] != site.value_dim:
        return f"keys have width {query.shape[-1]} and values {site.value_dim}"
    if not is_fused(device, dtype, query.shape[-1]):
        return f"no kernel for {dtype} heads of width {query.shape[-1]} on {device} passed its probe"
    return _obstacle_to_joint(reads, module, query, key, kwargs) if reads.joins_softmax else None


def _obstacle_to_joint(reads, module, query, key, kwargs) -> str | None:
    """The same for a prefix in the tokens' softmax, whose other half must be fused too."""
    if reads.splits_softmax:
        return "a prefix in the tokens' softmax differs from call to call"
    if kwargs.get("s_aux") is not None:
        return "the softmax has sinks"
    if kwargs.get("position_bias") is not None:
        return "positions are a bias on the scores"
    if implementation(module) == "eager":
        return "eager attention gives its weights"
    if query.shape[0] != key.shape[0]:
        return f"{query.shape[0]} rows of queries read {key.shape[0]} rows of keys"
    return None


def _trains_slowly(reads, module, query, key, kwargs) -> bool:
    """Whether this call's backward is slow in PyTorch's own attention and can be had by ours."""
    if not query.requires_grad or not FlashCPU.is_slow_backward(query, key) or torch.compiler.is_compiling():
        return False
    return _obstacle_to_joint(reads, module, query, key, kwargs) is None


def _token_segment(module, query, key, value, mask, scoring, kwargs) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own attention over its tokens, with the lse that its own function keeps to itself."""
    mask, causal = token_mask(module, query, key, mask, kwargs)
    if causal:
        mask = causal_mask(query.shape[2], key.shape[2], query.device)
    bias = kwargs.get("position_bias")  # T5: (1, H, T, S), added to the scores
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, bias, torch.finfo(bias.dtype).min)
        else:
            mask = bias if mask is None else bias + mask
    return attend(query, key, value, scoring, mask, sinks=kwargs.get("s_aux"))


# ---------------------------------------------------------------------------------------------------------------------
# Which path a site takes

_paths: ContextVar[dict[nn.Module, str] | None] = ContextVar("paths", default=None)


@contextmanager
def watch_paths() -> Iterator[dict[nn.Module, str]]:
    """Within the block, attention module → the path that its last call chose: "fused", or "reference: " and the reason.

    A generation chooses at its first step.

    Example:
        with watch_paths() as paths:
            model(**inputs)
    """
    paths: dict[nn.Module, str] = {}
    token = _paths.set(paths)
    try:
        yield paths
    finally:
        _paths.reset(token)


def _note(module: nn.Module, obstacle: str | None) -> None:
    """Log why a call takes the reference path, and keep the path for `watch_paths`."""
    if torch.compiler.is_compiling():
        return
    if obstacle is not None:
        logger.debug("%s takes the reference path: %s", type(module).__name__, obstacle)
    paths = _paths.get()
    if paths is not None:
        paths[module] = "fused" if obstacle is None else f"reference: {obstacle}"
