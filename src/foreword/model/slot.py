"""The parameters of adapters where the model keeps them: a slot on each attention module."""

from __future__ import annotations

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
    def reads_raw_query(self) -> bool:
        """Whether it reads queries before their rotation."""
        return getattr(self.combine, "raw_query", False)

    @property
    def reads_input(self) -> bool:
        """Whether it needs the arguments of the attention module's call."""
        return self.reads_raw_query

    @property
    def stacks(self) -> bool:
        """Whether its term is a softmax over keys and values and no more, so that one call can read it with others."""
        return hasattr(self.combine, "as_softmax") and not self.reads_input

    def piece(self, site: Site, shared: Any, rows: Tensor | None) -> Piece:
        """The keys and values (1 | n, G | H, l, D) whose softmax is this prefix's term."""
        key, value = self.combine.as_softmax(*self.key_value(site, shared))
        return Piece(_for_rows(key.to(site.dtype)), _for_rows(value.to(site.dtype)), rows)

    def reader(self, site: Site, shared: Any, rows: Tensor | None, plan: Plan) -> Reader:
        """This prefix in one call of the attention at `site`."""

        def compute() -> KeyValue:
            key, value = self.key_value(site, shared)
            return _for_rows(key.to(site.dtype)), _for_rows(value.to(site.dtype))

        key, value = plan.remember((self, rows), compute)
        query = site.raw_query(plan.call) if self.reads_raw_query and site.rotary is not None else None
        return Reader(self, key, value, rows, query)

    def key_value(self, site: Site, shared: Any) -> KeyValue:
        """Keys (G, l, D_k) and values (G, l, D_v), or (n, G, l, D) for each row; `shared` is the part's own."""
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
    key: Tensor  # (1 | n, G, l, D_k)
    value: Tensor  # (1 | n, G, l, D_v)
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


@dataclass
class Reads:
    """What a plan reads at one attention.

    Attributes:
        site: where.
        prefixes: each prefix, what its adapter computed once for all sites, and its rows (None: all).
        alone: those that can't be put together with others.
        joins_softmax: whether one of the prefixes is in the tokens' softmax.
        splits_softmax: whether one of those stands alone.
        decided_for: the attention function for which the path was chosen; the steps of a generation keep it.
        segments: what fused kernels read; None where the reference path reads the prefixes.
    """

    site: Site
    prefixes: list[tuple[Any, Any, Tensor | None]]
    alone: list[tuple[Any, Any, Tensor | None]]
    joins_softmax: bool
    splits_softmax: bool
    decided_for: Any = None
    segments: Segments | None = None

    def readers(self, plan: Plan) -> list[Reader]:
        """The prefixes one by one: those in the tokens' softmax first, then those added to its output."""
        readers = [prefix.reader(self.site, shared, rows, plan) for prefix, shared, rows in self.prefixes]
        return sorted(readers, key=lambda reader: not reader.prefix.joins_softmax)

    def together(self, batch: int) -> Segments | None:
        """The prefixes put together for B rows, but for `others`; None where they are too long for that."""
        pieces = [(p.joins_softmax, p.piece(self.site, *rest)) for p, *rest in self.prefixes if _stacks(p)]
        joint, apart = ([piece for joins, piece in pieces if joins is kind] for kind in (True, False))
        return together(joint, apart, batch)

    def others(self, plan: Plan) -> list[Reader]:
        """The readers that `together` leaves out."""
        return [prefix.reader(self.site, shared, rows, plan) for prefix, shared, rows in self.alone]


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

    def reads(self, plan: Plan) -> Reads:
        """What `plan` reads here; the same object throughout a generation."""
        return plan.remember((self, *plan.rows.items()), lambda: self._reads(plan))

    def _reads(self, plan: Plan) -> Reads:
        prefixes = [
            (prefix, plan.shared[name][int(part)], rows)
            for name, rows in plan.rows.items()
            if name in self.adapters
            for part, prefix in self.adapters[name].items()
        ]
        joining = [prefix for prefix, _, _ in prefixes if prefix.joins_softmax]
        alone = [entry for entry in prefixes if not _stacks(entry[0])]
        return Reads(self.site, prefixes, alone, bool(joining), not all(map(_stacks, joining)))

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


def _for_rows(tensor: Tensor) -> Tensor:
    """(G, l, D) for every row → (1, G, l, D); (n, G, l, D) for each row stays."""
    return tensor if tensor.dim() == 4 else tensor[None]


def _stacks(prefix: Any) -> bool:
    return getattr(prefix, "stacks", False)
