"""Which tokens are the prompt, for methods that compute something from it once."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .layout import by_name

IGNORED = -100  # label of a token that is not trained on


class _Running(threading.local):
    labels: Tensor | None = None


_running = _Running()


def watch_labels(model: nn.Module) -> list[RemovableHandle]:
    """Know the labels of each call of `model` while it lasts: in training the prompt ends where they begin."""
    return [
        model.register_forward_pre_hook(_enter, with_kwargs=True),
        model.register_forward_hook(_leave, always_call=True),
    ]


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    _running.labels = by_name(module, args, kwargs).get("labels")


def _leave(module: nn.Module, args: tuple, output: Any) -> None:
    _running.labels = None


def prompt_of(mask: Tensor | None, batch: int, length: int, device: torch.device, labelled: bool) -> Tensor:
    """(B, T) boolean: the real tokens in front of the first labelled one, and at least the first real one.

    Without labels, every real token that the model is given belongs to the prompt.

    Args:
        mask: attention mask (B, S) of which the last T columns are these tokens; anything else counts as no padding.
        labelled: whether the labels of the running call are those of these tokens.
    """
    real = torch.ones(batch, length, dtype=torch.bool, device=device)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        real = mask[:, -length:].bool()
    if not labelled or _running.labels is None:
        return real
    before = (_running.labels != IGNORED).cumsum(-1) == 0
    first = real & (real.cumsum(-1) == 1)
    return real & before | first
