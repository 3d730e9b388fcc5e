"""Terms of adapters at sublayers, linear layers and norms: a slot on the module whose output they change."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ..attention.readers import Plan
from .frames import Frame, current
from .layout import Block, tensors_in

NAME = "foreword_block"  # the slot's name as a child; "foreword" is the attention's


@dataclass(frozen=True)
class Reading:
    """Some rows of a batch in one call: what a term may ask of it.

    Attributes:
        plan: of the forward.
        rows: their indices; None for every row.
    """

    plan: Plan
    rows: Tensor | None

    @property
    def prompt(self) -> Tensor | None:
        """(B, T) boolean of these rows, see `Plan.prompt`."""
        prompt = self.plan.prompt
        return prompt if prompt is None or self.rows is None else prompt[self.rows]


class Term(nn.Module):
    """What an adapter does at a block: h' = forward(x, h).

    Attributes:
        order: terms of a lower order come first: 0 in place, 1 beside the block, 2 behind it.
        exclusive: whether only one term of that order can stand at a block.
    """

    order: ClassVar[int] = 1
    exclusive: ClassVar[bool] = False

    def enter(self, x: Tensor, reading: Reading) -> Tensor:
        """What the block reads instead of x."""
        return x

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        """x (B, T, d_in), h (B, T, d_out) → what the model reads instead of h."""
        raise NotImplementedError


class BlockSlot(nn.Module):
    """Child of a block's module: adapter name → part → `Term`.

    Terms at one module may see the block from several places: x is what enters the `enter` of the term's own block.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict()
        self._blocks: dict[tuple[str, str], Block] = {}  # adapter and part → the block as its term sees it
        self._entries: dict[nn.Module, Any] = {}  # `enter` of those blocks → handle of the hook there
        self._handle = module.register_forward_hook(self.after)

    def place(self, adapter: str, part: int, term: Term, block: Block) -> None:
        if adapter not in self.adapters:
            self.adapters[adapter] = nn.ModuleDict()
        self.adapters[adapter][str(part)] = term
        self._blocks[adapter, str(part)] = block
        if block.enter not in self._entries:
            self._entries[block.enter] = block.enter.register_forward_pre_hook(self.before, with_kwargs=True)

    def close(self) -> None:
        for handle in (self._handle, *self._entries.values()):
            handle.remove()

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook: keep x, and replace it where a term does."""
        frame = current()
        terms = [] if frame is None else [one for one in self._terms(frame.plan) if one[2] is module]
        if not terms:
            return None
        key = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None) if not args else None
        x = args[0] if key is None else kwargs[key]
        frame.inputs[self, module] = x
        entered = x
        for rows, term, _ in terms:
            entered = _on_rows(frame, rows, partial(term.enter, reading=Reading(frame.plan, rows)), entered)
        if entered is x:
            return None
        return ((entered, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: entered})

    def after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook: h through every term that the plan reads here."""
        frame = current()
        terms = [] if frame is None else [one for one in self._terms(frame.plan) if (self, one[2]) in frame.inputs]
        if not terms:
            return None
        h = tensors_in(output)[0]
        for rows, term, enter in terms:
            x = frame.inputs[self, enter]
            h = _on_rows(frame, rows, partial(term, reading=Reading(frame.plan, rows)), x, h)
        for enter in {enter for _, _, enter in terms}:
            del frame.inputs[self, enter]
        return h if isinstance(output, Tensor) else (h, *output[1:])

    def _terms(self, plan: Plan) -> list[tuple[Tensor | None, Term, nn.Module]]:
        """The rows, the term, and where its x enters, in the order in which terms change h."""
        terms = [
            (rows, term, self._blocks[name, part].enter)
            for name, rows in plan.rows.items()
            if name in self.adapters
            for part, term in self.adapters[name].items()
        ]
        return sorted(terms, key=lambda one: one[1].order)


def _on_rows(frame: Frame, rows: Tensor | None, function: Any, *tensors: Tensor) -> Tensor:
    """`function` of some rows of `tensors` (B, T, …), written into the last of them; tokens may lie flat, (B·T, …)."""
    batched = [tensor.view(frame.batch, -1, tensor.shape[-1]) if tensor.dim() == 2 else tensor for tensor in tensors]
    target = batched[-1]
    if rows is None:
        changed = function(*batched)
        unchanged = changed is target
    else:
        rows = rows.to(target.device)
        picked = [tensor[rows] for tensor in batched]
        changed = function(*picked)
        unchanged = changed is picked[-1]
        changed = changed if unchanged else target.index_copy(0, rows, changed)
    return tensors[-1] if unchanged else changed.view_as(tensors[-1])


def block_slot_of(block: Block) -> BlockSlot:
    """The slot of a block, made on first use."""
    if not isinstance(getattr(block.module, NAME, None), BlockSlot):
        setattr(block.module, NAME, BlockSlot(block.module))
    return getattr(block.module, NAME)


def evict_term(block: Block, adapter: str) -> None:
    """Remove an adapter from a block, and the slot with its last adapter."""
    slot = getattr(block.module, NAME, None)
    if slot is not None and adapter in slot.adapters:
        del slot.adapters[adapter]
        if not slot.adapters:
            slot.close()
            delattr(block.module, NAME)


def bare_copy(module: nn.Module) -> nn.Module:
    """A copy of a norm with its parameters, without hooks and slots."""
    clone = copy.deepcopy(module)
    clone._forward_pre_hooks.clear()
    clone._forward_hooks.clear()
    if hasattr(clone, NAME):
        delattr(clone, NAME)
    return clone
