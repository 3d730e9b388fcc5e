"""Change a model's adapters between two forwards, while other threads run it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import nn


class Gate:
    """A lock that every call of a model's stacks holds; whoever else holds it knows that no layer is running.

    Adapters hook themselves into layers. A hook that comes or goes in the middle of a forward would leave before it
    entered.

    Args:
        stacks: the models inside the model, whose layers carry adapters.

    Example:
        with gate:
            adapter.install()
    """

    def __init__(self, stacks: Sequence[nn.Module]) -> None:
        self._lock = threading.RLock()  # a stack runs inside a stack, and a soft prompt runs one inside its own forward
        self._handles: list[Any] = []
        for stack in stacks:
            self._handles.append(stack.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(stack.register_forward_hook(self._leave, always_call=True))

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def remove(self) -> None:
        """Take the hooks off the stacks."""
        with self:
            for handle in self._handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self._lock.acquire()

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._lock.release()
