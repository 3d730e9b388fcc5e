"""Adapters inside a packed batch: the queries of several requests in one row, as continuous batching gives them.

A packed attention call is (1, H, ΣT, D) queries and (1, G, ΣS, D) keys with a mask that keeps the requests apart. It is
cut into calls that a `Plan` can read: all requests with one new token are the rows of one batch, padded to the longest
cache; a request with several (its prompt) is a batch of its own. No request is computed against another's keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..attention.readers import Plan
from ..model.adapter import Adapter
from ..model.layout import Site
from ..model.part import Part
from ..model.streams import indices

Kept = WeakKeyDictionary[nn.Module, Any]  # module → what it computed, for as long as the module is on the model


@dataclass(frozen=True)
class LastingPlan(Plan):
    """A plan for many forwards, of adapters that don't change.

    Attributes:
        kept: what each module computed, shared by all plans; `memory` holds what depends on the rows.
    """

    kept: Kept = field(default_factory=Kept)

    def remember(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        memory: Any = self.kept if isinstance(key, nn.Module) else self.memory
        if key not in memory:
            memory[key] = compute()
        return memory[key]


class Plans:
    """Plans of combinations of adapters, kept while a combination goes on decoding.

    Args:
        adapters: the adapters on the model by name.
        device: of the model.
        capacity: combinations to keep; each holds the gathered prefixes of its rows.
    """

    def __init__(self, adapters: dict[str, Adapter], device: torch.device, capacity: int = 4) -> None:
        self._adapters = adapters
        self._device = device
        self._capacity = capacity
        self._kept: Kept = Kept()
        self._plans: OrderedDict[tuple[str | None, ...], LastingPlan] = OrderedDict()

    def of(self, names: tuple[str | None, ...]) -> LastingPlan:
        """The plan of a batch whose row b reads adapter names[b], or the base (None)."""
        if names not in self._plans:
            self._plans[names] = self._make(names)
            while len(self._plans) > self._capacity:
                self._plans.popitem(last=False)
        self._plans.move_to_end(names)
        return self._plans[names]

    def forget(self) -> None:
        """Drop every plan, because an adapter leaves the model."""
        self._plans.clear()

    def _make(self, names: tuple[str | None, ...]) -> LastingPlan:
        present = [name for name in dict.fromkeys(names) if name is not None]
        plan = LastingPlan(indices(names, self._device), memory={}, kept=self._kept)
        for name in present:
            parts = self._adapters[name].parts
            plan.shared[name] = [None if p.shared is None else plan.remember(p.shared, p.shared) for p in parts]
        return plan


def obstacle(adapter: Adapter) -> str | None:
    """Why an adapter can't be read in a packed batch; None where it can."""
    for part in adapter.parts:
        if type(part) is not Part or not all(isinstance(place, Site) for place in part.modules):
            return f"{part.method.name} acts outside of the attention"
        if part.reads_prompt:
            return f"{part.method.name} computes gates from the whole prompt"
    return None


@dataclass(frozen=True)
class PackedPlan(Plan):
    """The plan of a packed batch.

    Attributes:
        names: the adapter of each request, or None for the base.
        bounds: where the queries of each request begin in the packed row, and where the last ends.
        plans: the plan of those requests that have one query, as rows of a batch; and of each other request, by its
            index.
    """

    names: tuple[str | None, ...] = ()
    bounds: tuple[int, ...] = ()
    plans: dict[int | None, LastingPlan] = field(default_factory=dict)
    indices: dict[int, Packing] = field(default_factory=dict)  # by the identity of the cumulative key lengths

    @classmethod
    def of(cls, names: Sequence[str | None], bounds: Sequence[int], plans: Plans) -> PackedPlan:
        """The plan of requests with these adapters and query bounds."""
        lengths = [end - start for start, end in pairwise(bounds)]
        single = tuple(name for name, length in zip(names, lengths, strict=True) if length == 1)
        chosen: dict[int | None, LastingPlan] = {None: plans.of(single)} if single else {}
        chosen |= {i: plans.of((name,)) for i, (name, n) in enumerate(zip(names, lengths, strict=True)) if n > 1}
        rows: dict[str, Tensor | None] = {name: None for name in names if name is not None}
        return cls(rows, names=tuple(names), bounds=tuple(bounds), plans=chosen)

    def read(self, original, module, query, key, value, mask, **kwargs):
        """The attention call (1, H, ΣT, D) in parts, each read by its own plan."""
        slot = getattr(module, "foreword", None)
        if slot is None or not any(name in slot.adapters for name in self.rows):
            return original(module, query, key, value, mask, **kwargs)
        packing = self._packing(kwargs["cu_seq_lens_k"], query.device)
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])  # (1, ΣT, H, D)
        for index, plan in self.plans.items():
            cut = packing.single if index is None else packing.spans[index]
            arguments = cut.queries(query), cut.keys(key), cut.keys(value), cut.mask(mask)
            read = self._with_states(plan, cut).read(original, module, *arguments, **kwargs)[0]  # (B, T, H, D)
            out[0, cut.places] = read.flatten(0, 1)
        return out, None

    def _packing(self, key_bounds: Tensor, device: torch.device) -> Packing:
        """Where the requests' queries and keys stand; one for all layers that cache alike."""
        if id(key_bounds) not in self.indices:
            self.indices[id(key_bounds)] = Packing.of(self.bounds, key_bounds.tolist(), device)
        return self.indices[id(key_bounds)]

    def _with_states(self, plan: LastingPlan, cut: Rows | Span) -> Plan:
        """`plan` with the hidden states of its own rows, where the attention module passed on its arguments."""
        if self.call is None:
            return plan
        states = self.call["hidden_states"][0, cut.places]  # (B·T, d)
        call = {**self.call, "hidden_states": states.unflatten(0, (cut.batch, -1))}
        return LastingPlan(plan.rows, plan.shared, plan.memory, plan.prompt, call, kept=plan.kept)


@dataclass(frozen=True)
class Rows:
    """Requests with one query each, as the rows of a batch.

    Attributes:
        places: (R,) of their queries in the packed row.
        key_places: (R, S) of their keys, S the longest; behind a row's last key stands some other key.
        hidden: (R, S) boolean, True for those others.
    """

    places: Tensor
    key_places: Tensor
    hidden: Tensor

    @property
    def batch(self) -> int:
        return len(self.places)

    def queries(self, query: Tensor) -> Tensor:
        """(1, H, ΣT, D) → (R, H, 1, D)."""
        return query[0][:, self.places].transpose(0, 1)[:, :, None]

    def keys(self, key: Tensor) -> Tensor:
        """(1, G, ΣS, D) → (R, G, S, D)."""
        return key[0][:, self.key_places].transpose(0, 1)

    def mask(self, mask: Tensor) -> Tensor:
        """(1, 1, ΣT, ΣS) additive → (R, 1, 1, S)."""
        seen = mask[0, 0][self.places[:, None], self.key_places]
        return seen.masked_fill(self.hidden, torch.finfo(mask.dtype).min)[:, None, None]


@dataclass(frozen=True)
class Span:
    """One request with several queries, a batch of its own."""

    places: slice
    key_places: slice
    batch: int = 1

    def queries(self, query: Tensor) -> Tensor:
        return query[:, :, self.places]

    def keys(self, key: Tensor) -> Tensor:
        return key[:, :, self.key_places]

    def mask(self, mask: Tensor) -> Tensor:
        return mask[:, :, self.places, self.key_places]


@dataclass(frozen=True)
class Packing:
    """Where the queries and keys of requests stand in a packed call: with one query together, the others by index."""

    single: Rows | None
    spans: dict[int, Span]

    @classmethod
    def of(cls, bounds: Sequence[int], key_bounds: Sequence[int], device: torch.device) -> Packing:
        """From where each request's queries, and keys, begin, and where the last ends."""
        singles: list[tuple[int, int, int]] = []  # the query's place, the first key's, the number of keys
        spans: dict[int, Span] = {}
        for index in range(len(bounds) - 1):
            start, end, first, last = *bounds[index : index + 2], *key_bounds[index : index + 2]
            if end - start == 1:
                singles.append((start, first, last - first))
            else:
                spans[index] = Span(slice(start, end), slice(first, last))
        if not singles:
            return cls(None, spans)
        places, firsts, sizes = torch.tensor(singles, device=device).T
        offsets = torch.arange(int(max(size for _, _, size in singles)), device=device)
        key_places = (firsts[:, None] + offsets).clamp(max=key_bounds[-1] - 1)
        return cls(Rows(places, key_places, offsets >= sizes[:, None]), spans)
