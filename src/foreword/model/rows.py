"""Which adapter each row of a batch reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from ..errors import ForewordError
from .host import host_on, host_with, row_names


@contextmanager
def rows(model: PreTrainedModel, names: Sequence[str | None]) -> Iterator[None]:
    """Within the block, row b of every batch reads the adapter names[b]; None is the base model.

    Beams and samples of a row follow it: a batch of k·len(names) rows gives each name k rows side by side, as
    `generate` expands them. The choice belongs to the calling thread, so threads that generate with different
    adapters don't see each other's.

    Example:
        with fw.rows(model, ["support", None, "billing"]):
            model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"))

    Raises:
        ForewordError: an unknown adapter, one that acts on all rows alike (ia3, vera, bitfit, full), or (in the
        forward) a batch that the names don't divide.
    """
    if not names:
        raise ForewordError("rows needs the adapter name of at least one row")
    for name in names:
        if name is not None:
            host_with(model, name)
    host = host_on(model)
    if host is None:
        yield
        return
    for name in {*names, host.active} - {None}:
        fixed = [part for part in host.require(name).parts if not part.per_row]
        if fixed and set(names) != {host.active}:
            raise ForewordError(
                f"rows can't mix adapter {name!r}: {fixed[0].method.name} acts on every row of a batch alike; "
                "use set_active"
            )
    token = row_names.set({**row_names.get(), id(host): tuple(names)})
    try:
        yield
    finally:
        row_names.reset(token)
