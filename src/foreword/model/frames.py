"""The plan of the layer that is running, for modules that receive no keyword: feed-forward sublayers, linear layers,
norms.

A stack and each of its layers receive the keyword `foreword`. Hooks put the plan on a pile of the running thread for
as long as their call lasts. transformers checkpoints a layer's `forward`, inside of the hooks, so the function that
it checkpoints with is wrapped too: a layer that is recomputed in the backward pass finds its plan again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..attention.readers import Plan


@dataclass
class Frame:
    """One call of a stack or a layer.

    Attributes:
        plan: which adapter each row reads.
        batch: B.
        inputs: what entered each block that is still running.
    """

    plan: Plan
    batch: int
    inputs: dict[Any, Tensor] = field(default_factory=dict)


class _Running(threading.local):
    def __init__(self) -> None:
        self.frames: list[tuple[Any, Frame | None]] = []  # who keeps it, and the frame; the innermost last


_running = _Running()


def current() -> Frame | None:
    """The frame of the innermost running layer or stack; None where it reads no adapter."""
    return _running.frames[-1][1] if _running.frames else None


def watch(module: nn.Module) -> list[Any]:
    """Keep a frame for as long as each call of `module` lasts. Returns handles with `remove`."""
    return [
        module.register_forward_pre_hook(_enter, with_kwargs=True),
        module.register_forward_hook(_leave, with_kwargs=True, always_call=True),
        _Unwrap(module),
    ]


def watch_head(stack: nn.Module, model: nn.Module) -> list[Any]:
    """Keep the frame of each call of `stack` for what `model` runs behind it: its output head."""

    def open_model(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        _running.frames.append((model, None))

    def after_stack(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if _running.frames and _running.frames[-1][0] is model:  # not where the stack is called by itself
            _running.frames[-1] = (model, _frame(args, kwargs))

    return [
        model.register_forward_pre_hook(open_model, with_kwargs=True),
        stack.register_forward_hook(after_stack, with_kwargs=True),
        model.register_forward_hook(_leave, with_kwargs=True, always_call=True),
    ]


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    _running.frames.append((module, _frame(args, kwargs)))
    checkpoint = getattr(module, CHECKPOINT, None)
    if checkpoint is not None and not isinstance(checkpoint, FramedCheckpoint):
        setattr(module, CHECKPOINT, FramedCheckpoint(checkpoint))


def _leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    if _running.frames and _running.frames[-1][0] is module:  # not where an earlier hook refused the call
        _running.frames.pop()


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Within the block the adapter `name` computes something of its own, as a batch of one row that reads it."""
    _running.frames.append((name, Frame(Plan({name: None}), 1)))
    try:
        yield
    finally:
        _running.frames.pop()


def _frame(args: tuple, kwargs: dict[str, Any]) -> Frame | None:
    plan = kwargs.get("foreword")
    if not isinstance(plan, Plan):  # a recorder, within what an adapter computes alone, or none
        return None if plan is None else current()
    states = next(value for value in (*args, *map(kwargs.get, INPUTS)) if isinstance(value, Tensor))
    return Frame(plan, states.shape[0])


INPUTS = ("hidden_states", "input_ids", "inputs_embeds", "input_features")  # keywords of layers and stacks
CHECKPOINT = (
    "_gradient_checkpointing_func"  # of transformers' layers: called with a partial of `forward`, and arguments
)


@dataclass
class FramedCheckpoint:
    """A layer's checkpointing function, which keeps a frame while the layer runs for the first time and again."""

    checkpoint: Callable[..., Any]

    def __call__(self, forward: partial, *args: Any) -> Any:
        return self.checkpoint(partial(_run_framed, forward), *args)


def _run_framed(forward: partial, *args: Any) -> Any:
    _running.frames.append((forward, _frame(args, forward.keywords)))
    try:
        return forward(*args)
    finally:
        _running.frames.pop()


def is_reentrant(module: nn.Module) -> bool:
    """Whether a stack or layer is checkpointed with `use_reentrant=True`, which runs it again in a backward of its own.

    What an adapter computed once for all layers, or handed from one to the next, is out of reach of that backward.
    """
    checkpoint = getattr(module, CHECKPOINT, None)
    if isinstance(checkpoint, FramedCheckpoint):
        checkpoint = checkpoint.checkpoint
    settings = getattr(checkpoint, "keywords", {})  # of a partial of `torch.utils.checkpoint.checkpoint`
    return getattr(module, "gradient_checkpointing", False) and settings.get("use_reentrant", False)


@dataclass
class _Unwrap:
    module: nn.Module

    def remove(self) -> None:
        wrapped = getattr(self.module, CHECKPOINT, None)
        if isinstance(wrapped, FramedCheckpoint):
            setattr(self.module, CHECKPOINT, wrapped.checkpoint)
