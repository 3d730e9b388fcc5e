"""The plan of the layer that is running, for modules that receive no keyword: feed-forward sublayers, linear layers, norms.

A stack and each of its layers receive the keyword `foreword`. Hooks put the plan on a stack of the running thread for as long as
their call lasts. A checkpointed layer is called again when it is recomputed, and so finds its plan again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
        self.frames: list[Frame | None] = []


_running = _Running()


def current() -> Frame | None:
    """The frame of the innermost running layer or stack; None where it reads no adapter."""
    return _running.frames[-1] if _running.frames else None


def watch(module: nn.Module) -> list[RemovableHandle]:
    """Keep a frame for as long as each call of `module` lasts."""
    return [
        module.register_forward_pre_hook(_enter, with_kwargs=True),
        module.register_forward_hook(_leave, with_kwargs=True, always_call=True),
    ]


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    plan = kwargs.get("foreword")
    if not isinstance(plan, Plan):
        _running.frames.append(None)
        return
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    _running.frames.append(Frame(plan, first.shape[0]))


def _leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    _running.frames.pop()
