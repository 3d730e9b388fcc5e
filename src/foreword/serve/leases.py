"""An adapter by its name, on the model, and in use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ForewordError
from ..model.adapter import Adapter


class Unknown(ForewordError):
    """There is no adapter of that name."""

    def __init__(self, name: str | None) -> None:
        super().__init__(f"there is no adapter {name!r}")


@dataclass(frozen=True, eq=False)
class Registered:
    """A name and where its adapter is.

    Attributes:
        name: as clients call it.
        folder: with `adapter.json`.
        methods: names of its methods.
        size: bytes of its weights file.
    """

    name: str
    folder: Path
    methods: tuple[str, ...]
    size: int


@dataclass(eq=False)
class Resident:
    """An adapter on the model, where it has a new name each time: a replaced one can finish beside its successor.

    Attributes:
        leases: how many requests use it.
    """

    registered: Registered
    adapter: Adapter
    leases: int = 0

    def lease(self) -> Lease:
        return Lease(self.adapter.name, self.adapter, self)


@dataclass(frozen=True)
class Lease:
    """The right to use an adapter, until it is given back.

    Attributes:
        key: name of the adapter on the model; None for the base.
        adapter: its handle.
    """

    key: str | None = None
    adapter: Adapter | None = None
    resident: Resident | None = field(default=None, repr=False)
