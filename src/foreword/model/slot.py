"""The parameters of adapters where the model keeps them: a slot on each attention module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.merge import Scoring
from ..attention.readers import KeyValue, Plan
from ..attention.stack import Piece, Segments, together
from .frames import alone
from .layout import Site, by_name


class Prefix(nn.Module):
    """Extra keys and values at one attention module: where they come from, and how they meet the tokens.

    Attributes:
        source: module that gives the keys (G, l, D_k) and values (G, l, D_v).
        combine: module with the equation that joins them to the tokens' attention.
        dropout: probability of dropping an entry of the keys and values in training.
        owner: name of its adapter, once it is placed.
    """

    def __init__(self, source: nn.Module, combine: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.source = source
        self.combine = combine
        self.dropout = dropout
        self.owner = ""

    @property
    def joins_softmax(self) -> bool:
        return self.combine.joins_softmax

    @property
    def reads_input(self) -> bool:
        """Whether it needs the arguments of the attention module's call: a query before its rotation is made of them."""
        return getattr(self.combine, "raw_query", False)

    @property
    def stacks(self) -> bool:
        """Whether its term is a softmax over keys and values and no more, so that one call can read it with others."""
        return hasattr(self.combine, "as_softmax") and not self.reads_input

    def piece(self, site: Site, shared: Any, rows: Tensor | None) -> Piece:
        """The keys and values (1, G | H, l, D) whose softmax is this prefix's term."""
        key, value = self.combine.as_softmax(*self.key_value(site, shared))
        return Piece(key.to(site.dtype)[None], value.to(site.dtype)[None], rows)

    def reader(self, site: Site, shared: Any, rows: Tensor | None, plan: Plan) -> Reader:
        """This prefix in one call of the attention at `site`."""

        def compute() -> KeyValue:
            key, value = self.key_value(site, shared)
            return key.to(site.dtype)[None], value.to(site.dtype)[None]

        key, value = plan.remember(self, compute)
        query = site.raw_query(plan.call) if self.reads_input and site.rotary is not None else None
        return Reader(self, key, value, rows, query)

    def key_value(self, site: Site, shared: Any) -> KeyValue:
        """Keys (G, l, D_k) and values (G, l, D_v); `shared` is what the adapter computed once for all sites."""
        with alone(self.owner):  # its changes of the projections hold for its own prompts too
            key, value = self.source(site, shared)
        return (
            nn.functional.dropout(key, self.dropout, self.training),
            nn.functional.dropout(value, self.dropout, self.training),
        )


@dataclass(frozen=True)
class Reader:
    """One prefix in one attention call, for some rows of the batch (None: for all)."""

    prefix: Prefix
    key: Tensor  # (1, G, l, D_k)
    value: Tensor  # (1, G, l, D_v)
    rows: Tensor | None
    query: Tensor | None = None  # (B, H, T, D) to read instead of the tokens' query

    def add(self, query: Tensor, out: Tensor, lse: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
        """Add the prefix's term to out (B, H, T, D) and keep the lse (B, H, T) of the joint softmax."""
        query = query if self.query is None else self.query
        if self.rows is None:
            return self.prefix.combine(query, out, lse, self.key, self.value, scoring)
        rows = self.rows
        lse_rows = None if lse is None else lse[rows]
        new_out, new_lse = self.prefix.combine(query[rows], out[rows], lse_rows, self.key, self.value, scoring)
        out = out.index_copy(0, rows, new_out)
        return out, lse if lse is None or new_lse is None else lse.index_copy(0, rows, new_lse)


class Slot(nn.Module):
    """Child module `foreword` of an attention module: adapter name → part → `Prefix`."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site  # a dataclass, so that the attention module is not registered as a child of its own child
        self.adapters = nn.ModuleDict()
        self._handle: RemovableHandle | None = None  # of the hook that passes on the attention module's arguments

    def place(self, adapter: str, part: int, prefix: nn.Module) -> None:
        if adapter not in self.adapters:
            self.adapters[adapter] = nn.ModuleDict()
        self.adapters[adapter][str(part)] = prefix
        prefix.owner = adapter
        if prefix.reads_input and self._handle is None:
            self._handle = self.site.module.register_forward_pre_hook(_with_call, with_kwargs=True)

    def readers(self, plan: Plan) -> list[Reader]:
        """The prefixes that `plan` reads here: those in the tokens' softmax first, then those added to its output."""
        readers = [prefix.reader(self.site, shared, rows, plan) for prefix, shared, rows in self._read_by(plan)]
        return sorted(readers, key=lambda reader: not reader.prefix.joins_softmax)

    def segments(self, plan: Plan, batch: int) -> Segments:
        """The same prefixes put together for B rows, but for `others`, and kept during a generation."""
        return plan.remember((self, *plan.rows.items()), lambda: self._segments(plan, batch))

    def others(self, plan: Plan) -> list[Reader]:
        """The readers that `segments` leaves out."""
        return [
            prefix.reader(self.site, shared, rows, plan)
            for prefix, shared, rows in self._read_by(plan)
            if not _stacks(prefix)
        ]

    def reads(self, plan: Plan) -> bool:
        return any(name in self.adapters for name in plan.rows)

    def joins_softmax(self, plan: Plan) -> bool:
        return any(prefix.joins_softmax for prefix, _, _ in self._read_by(plan))

    def splits_softmax(self, plan: Plan) -> bool:
        """Whether `segments` leaves out a prefix that is in the tokens' softmax."""
        left_out = lambda: any(p.joins_softmax and not _stacks(p) for p, _, _ in self._read_by(plan))  # noqa: E731
        return plan.remember((self, "splits", *plan.rows.items()), left_out)

    def joins_unstacked(self, plan: Plan) -> bool:
        """Whether a prefix in the tokens' softmax can't be put together with others."""
        return any(prefix.joins_softmax and not _stacks(prefix) for prefix, _, _ in self._read_by(plan))

    def _read_by(self, plan: Plan) -> Iterator[tuple[Any, Any, Tensor | None]]:
        """Each prefix that `plan` reads here, what its adapter computed once, and its rows."""
        for name, rows in plan.rows.items():
            if name in self.adapters:
                for part, prefix in self.adapters[name].items():
                    yield prefix, plan.shared[name][int(part)], rows

    def _segments(self, plan: Plan, batch: int) -> Segments:
        joint: list[list[Piece]] = []  # adapter → its prefixes in the tokens' softmax
        apart: list[list[Piece]] = []  # adapter → its prefixes with a softmax of their own
        complete = True
        for name, rows in plan.rows.items():
            if name in self.adapters:
                joint.append([])
                apart.append([])
                for part, prefix in self.adapters[name].items():
                    if _stacks(prefix):
                        pieces = joint if prefix.joins_softmax else apart
                        pieces[-1].append(prefix.piece(self.site, plan.shared[name][int(part)], rows))
                    else:
                        complete = False
        return together(joint, apart, batch, complete)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()


def _with_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of an attention module: put the arguments of its call into the plan that it passes on."""
    plan = kwargs.get("foreword")
    if not isinstance(plan, Plan):
        return None
    return args, {**kwargs, "foreword": replace(plan, call=by_name(module, args, kwargs))}


def slot_of(site: Site) -> Slot:
    """The slot of a site, made on first use."""
    if not isinstance(getattr(site.module, "foreword", None), Slot):
        site.module.foreword = Slot(site)
    return site.module.foreword


def evict(site: Site, adapter: str) -> None:
    """Remove an adapter from a site, and the slot with its last adapter."""
    slot = getattr(site.module, "foreword", None)
    if slot is not None and adapter in slot.adapters:
        del slot.adapters[adapter]
        if not slot.adapters:
            slot.close()
            del site.module.foreword


def _stacks(prefix: Any) -> bool:
    return getattr(prefix, "stacks", False)
