"""Which tokens are the prompt, for methods that compute something from it once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import ForewordError
from .layout import by_name

IGNORED = -100  # label of a token that is not trained on


class _Running(threading.local):
    def __init__(self) -> None:
        self.prompts: list[tuple[Any, Tensor | None]] = []  # who says so, and the prompt; the innermost last


_running = _Running()


@contextmanager
def known_prompt(mask: Tensor | None) -> Iterator[None]:
    """Within the block, the True columns at the start of `mask` (B, P) are the prompt; what follows them is an answer.

    Methods with a gate compute it from the prompt (`unipelt`). A model that is called with `labels` knows its prompt
    by itself, and so does `generate` with a cache; other forwards over prompt and answer together need this, and in
    training a decoder refuses to go without. Beams and samples follow their row.

    Example:
        with fw.known_prompt(labels == -100):
            logits = model(input_ids).logits
    """
    _running.prompts.append((known_prompt, mask))
    try:
        yield
    finally:
        _running.prompts.pop()


def watch_labels(model: nn.Module) -> list[RemovableHandle]:
    """Know the prompt of each call of `model` that is given labels, while it lasts."""
    return [
        model.register_forward_pre_hook(_enter, with_kwargs=True),
        model.register_forward_hook(_leave, always_call=True),
    ]


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    labels = by_name(module, args, kwargs).get("labels")
    _running.prompts.append((module, _known() if labels is None else labels == IGNORED))


def _leave(module: nn.Module, args: tuple, output: Any) -> None:
    if _running.prompts and _running.prompts[-1][0] is module:  # not where an earlier hook refused the call
        _running.prompts.pop()


def _known() -> Tensor | None:
    return _running.prompts[-1][1] if _running.prompts else None


def require_known() -> None:
    """Raise `ForewordError` where nothing says where the prompt ends.

    A decoder that learns gates from a whole text would see the answer in them.
    """
    if _known() is None:
        raise ForewordError(
            "an adapter computes gates from the prompt, and nothing says where it ends: call the model with labels, or "
            "within `foreword.known_prompt(labels == -100)`"
        )


def prompt_of(mask: Any, batch: int, length: int, device: torch.device, is_target: bool) -> Tensor:
    """(B, T) boolean: the real tokens of the prompt, and at least the first real token.

    Where nothing says where the prompt ends, every real token that the model is given belongs to it.

    Args:
        mask: attention mask (B, S) of which the last T columns are these tokens, or the four-dimensional masks that
            `generate` prepares for a static cache, (B, 1, T, S) with these tokens first; None for no padding.
        is_target: whether these are the tokens that labels and `known_prompt` are about, not those of an encoder.
    """
    real = _real_tokens(mask, batch, length, device)
    known = _known() if is_target else None
    if known is None:
        return real
    leading = known.to(device).long().cumprod(-1).bool()[:, :length]
    leading = nn.functional.pad(leading, (0, length - leading.shape[1])).repeat_interleave(batch // len(leading), dim=0)
    first = real & (real.cumsum(-1) == 1)
    return real & leading | first


def _real_tokens(mask: Any, batch: int, length: int, device: torch.device) -> Tensor:
    if isinstance(mask, dict):  # one mask for each type of layer
        mask = mask.get("full_attention", next(iter(mask.values())))
    if not isinstance(mask, Tensor):
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    if mask.dim() == 2:
        return mask[:, -length:].bool()
    seen = mask[:, 0].diagonal(dim1=-2, dim2=-1)[:, :length]  # what is no padding sees itself, in a window too
    return (seen if seen.dtype == torch.bool else seen == 0).expand(batch, -1)
