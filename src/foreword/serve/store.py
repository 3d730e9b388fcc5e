"""Thousands of adapters by name, of which some are on the model.

An adapter is registered (a name and a folder), in memory (its numbers, pinned where the model is on a GPU), or resident
(on the model). Resident adapters and numbers in memory each have a budget in bytes; the least recently used go first.
Whoever uses an adapter holds a lease on it: a leased adapter stays, even when its name is registered anew or removed,
and goes with its last lease.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint import CONFIG, check_base, describe_base, fill, read, with_weights
from ..errors import ForewordError
from ..model.adapter import Adapter
from ..model.attach import require_compatible
from ..model.host import host_of
from ..sources.text import Blank
from ..space import Method
from .leases import Lease, Registered, Resident, Unknown
from .limits import GIB

logger = logging.getLogger("foreword.serve")


class Store:
    """The adapters of one model. Every method may be called from any thread.

    Args:
        model: its adapters, if it has some already, stay as they are.
        resident_bytes: budget for adapters on the model, by the size of their weights files.
        memory_bytes: budget for numbers kept in memory, so that an adapter comes back without reading its file.
        gate: held while adapters come and go, so that no forward runs.
        on_eviction: called inside of the gate when an adapter has left the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        resident_bytes: int = GIB,
        memory_bytes: int = GIB,
        gate: AbstractContextManager[Any] | None = None,
        on_eviction: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host_of(model)
        self.resident_bytes = resident_bytes
        self.memory_bytes = memory_bytes
        self._base = describe_base(model, self.host.layout)
        self._gate = gate or nullcontext()
        self._on_eviction = on_eviction
        self._registered: dict[str, Registered] = {}
        self._resident: OrderedDict[Registered, Resident] = OrderedDict()  # the least recently used first
        self._memory: OrderedDict[Registered, tuple[dict[str, Any], dict[str, Tensor]]] = OrderedDict()
        self._lock = threading.Lock()  # of the three above
        self._loading = threading.Lock()  # one adapter comes at a time
        self._keys = (f"served{number}" for number in itertools.count())

    # -----------------------------------------------------------------------------------------------------------------
    # Names

    @property
    def names(self) -> list[str]:
        with self._lock:
            return list(self._registered)

    def get(self, name: str) -> Registered | None:
        return self._registered.get(name)

    def resident(self) -> list[str]:
        """Names whose present adapter is on the model, the most recently used first."""
        with self._lock:
            current = [one for one in self._resident if self._is_current(one)]
        return [one.name for one in reversed(current)]

    @property
    def bytes_resident(self) -> int:
        with self._lock:
            return sum(one.size for one in self._resident)

    def register(self, name: str, folder: str | Path) -> Registered:
        """Know the adapter in `folder` by `name`, in the place of what had the name. Its weights are read on first use.

        Raises `ForewordError` where the folder holds no adapter for this model, or one larger than the budget.
        """
        if not name:
            raise ForewordError("an adapter needs a name")
        folder = Path(folder)
        config, size = with_weights(folder, lambda path: path.stat().st_size)
        check_base(config["base"], self._base, folder)
        new = Registered(name, folder, tuple(method.name for method in config["methods"]), size)
        if new.size > self.resident_bytes:
            raise ForewordError(
                f"{folder} has {new.size:,} bytes; all resident adapters may have {self.resident_bytes:,}"
            )
        with self._lock:
            self._registered[name] = new
        self.sweep()
        return new

    def unregister(self, name: str) -> None:
        """Forget a name; requests that use its adapter finish. Raises `Unknown`."""
        with self._lock:
            del self._registered[self._known(name).name]
        self.sweep()

    def scan(self, folder: str | Path) -> list[str]:
        """Register every adapter folder in `folder` under its own name; log those that can't be. Returns the names."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ForewordError(f"there is no folder {folder}")
        found = []
        for config in sorted(folder.glob(f"*/{CONFIG}")):
            try:
                found.append(self.register(config.parent.name, config.parent).name)
            except ForewordError as error:
                logger.warning("not served: %s", error)
        return found

    # -----------------------------------------------------------------------------------------------------------------
    # Leases

    def hold(self, name: str | None) -> Lease | None:
        """A lease on a resident adapter; None where it is not. The name None is the base. Raises as `lease`."""
        if name is None:
            return Lease()
        with self._lock:
            resident = self._resident.get(self._known(name))
            if resident is None:
                return None
            resident.leases += 1
            self._resident.move_to_end(resident.registered)
            return resident.lease()

    def lease(self, name: str | None) -> Lease | None:
        """The right to use an adapter, which comes onto the model if it is not there.

        Returns None where there is no room, because leased adapters fill the budget: try again when a lease is given
            back.
        Raises `Unknown`, or `ForewordError` where the adapter can't be loaded.
        """
        if (held := self.hold(name)) is not None:
            return held
        with self._loading:
            if (held := self.hold(name)) is not None:  # another thread has loaded it
                return held
            with self._lock:
                registered = self._known(name)
            if not self._make_room(registered.size):
                return None
            resident = Resident(registered, self._load(registered), leases=1)
            with self._lock:
                self._resident[registered] = resident
            return resident.lease()

    def release(self, lease: Lease) -> bool:
        """Give a lease back. Returns whether `sweep` has something to take off the model now."""
        resident = lease.resident
        if resident is None:
            return False
        with self._lock:
            resident.leases -= 1
            return not resident.leases and not self._is_current(resident.registered)

    def sweep(self) -> None:
        """Take the adapters off the model whose names are gone, and that nobody uses."""
        with self._lock:
            stale = [one for one in self._resident.values() if not one.leases and not self._is_current(one.registered)]
            for resident in stale:
                del self._resident[resident.registered]
            for registered in [one for one in self._memory if not self._is_current(one)]:
                del self._memory[registered]
        self._evict(stale)

    def _known(self, name: str | None) -> Registered:
        if name not in self._registered:
            raise Unknown(name)
        return self._registered[name]

    def _is_current(self, registered: Registered) -> bool:
        return self._registered.get(registered.name) is registered

    # -----------------------------------------------------------------------------------------------------------------
    # On and off the model

    def _make_room(self, size: int) -> bool:
        """Evict what has not been used for longest, until `size` bytes fit. False where leases are in the way."""
        with self._lock:
            excess = sum(one.size for one in self._resident) + size - self.resident_bytes
            victims = []
            for resident in self._resident.values():
                if excess <= 0:
                    break
                if not resident.leases:
                    victims.append(resident)
                    excess -= resident.registered.size
            if excess > 0:
                return False
            for resident in victims:
                del self._resident[resident.registered]
        self._evict(victims)
        return True

    def _evict(self, victims: list[Resident]) -> None:
        if not victims:
            return
        with self._gate:
            for resident in victims:
                self._remove(resident.adapter)
            self._on_eviction()

    def _load(self, registered: Registered) -> Adapter:
        """Put an adapter on the model in its stored form. No row reads it before it has a lease."""
        config, tensors = self._read(registered)
        with self._gate:  # building may run the model's own modules to see what they do
            adapter = self._install(registered.name, config["methods"])
        try:
            if config["folded"]:
                adapter.fold()
            fill(adapter, tensors, registered.folder)
            adapter.fold()
        except Exception:
            with self._gate:
                self._remove(adapter)
            raise
        for part in adapter.parts:
            for module in part.named_modules().values():
                module.eval().requires_grad_(False)
        return adapter

    def _install(self, name: str, methods: list[Method]) -> Adapter:
        """An adapter on the model, its numbers still to come."""
        host = self.host
        start = Blank(host.model, host.layout)
        parts = [part for method in methods for part in method.parts(host.layout, start)]
        require_compatible(parts)
        fixed = [part for part in parts if not part.per_row]
        if fixed:
            raise ForewordError(
                f"{name} can't be served beside others: {fixed[0].method.name} changes weights that "
                "all rows of a batch share"
            )
        adapter = Adapter(host, next(self._keys), methods, parts)
        try:
            adapter.install()
        except ForewordError:
            adapter.remove()
            raise
        host.adapters[adapter.name] = adapter
        return adapter

    def _remove(self, adapter: Adapter) -> None:
        adapter.remove()
        del self.host.adapters[adapter.name]

    def _read(self, registered: Registered) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """An adapter's configuration and numbers, from memory or else from its folder."""
        with self._lock:
            if registered in self._memory:
                self._memory.move_to_end(registered)
                return self._memory[registered]
        config, tensors = read(registered.folder)
        if self.host.model.device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        with self._lock:
            self._memory[registered] = config, tensors
            while sum(one.size for one in self._memory) > self.memory_bytes:
                self._memory.popitem(last=False)
        return config, tensors
