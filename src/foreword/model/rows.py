"""Which adapter each row of a batch reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from ..errors import ForewordError
from .host import Host, host_on, host_with, row_names, row_streams
from .streams import Sets


@contextmanager
def rows(
    model: PreTrainedModel, names: Sequence[str | None], streams: Sequence[int | None] | None = None
) -> Iterator[None]:
    """Within the block, row b of every batch reads the adapter names[b]; None is the base model.

    streams[b] is the number of its parallel streams, where the adapter has sets of them; None is what `set_streams`
    chose.

    Beams and samples of a row follow it: a batch of k·len(names) rows gives each name k rows side by side, as
    `generate` expands them. The choice belongs to the calling thread, so threads that generate with different
    adapters don't see each other's.

    Example:
        with fw.rows(model, ["support", None, "billing"]):
            model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"))

    Raises:
        ForewordError: an unknown adapter, a number of streams that it has no set for, one that acts on all rows alike
        (ia3, vera, bitfit, full), or (in the forward) a batch that the names don't divide.
    """
    if isinstance(names, str) or not names:
        raise ForewordError("rows needs a list with the adapter name of every row, for at least one row")
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
    chosen = (None,) * len(names) if streams is None else tuple(streams)
    if len(chosen) != len(names):
        raise ForewordError(f"rows names {len(names)} adapters and {len(chosen)} numbers of streams; give one each")
    for name, size in zip(names, chosen, strict=True):
        if size is not None:
            _sets(host, name).require(size)
    names_token = row_names.set({**row_names.get({}), id(host): tuple(names)})
    streams_token = row_streams.set({**row_streams.get({}), id(host): chosen})
    try:
        yield
    finally:
        row_names.reset(names_token)
        row_streams.reset(streams_token)


def set_streams(model: PreTrainedModel, streams: int | None, name: str | None = None) -> None:
    """Choose the number P of parallel streams that every forward reads, of those that the adapter has a set for.

    None is the state after `attach`: in training the sets take turns, one a forward; otherwise the largest is read.

    Args:
        streams: P, or None.
        name: of the adapter; the active one by default.

    Raises:
        ForewordError: the model has no such adapter, the adapter has no streams, or none for this P.
    """
    host = host_on(model) if name is None else host_with(model, name)
    if host is None:
        raise ForewordError("set_streams needs an adapter with parallel streams (parscale); the model has none")
    sets = _sets(host, host.active if name is None else name)
    sets.chosen = None if streams is None else sets.require(streams)


def _sets(host: Host, name: str | None) -> Sets:
    if name not in host.sets:
        reader = "the base model" if name is None else f"adapter {name!r}"
        raise ForewordError(f"{reader} has no parallel streams; an adapter of parscale has")
    return host.sets[name]
