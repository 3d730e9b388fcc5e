"""Put adapters on a frozen model, choose among them, and take them off again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ForewordError
from ..sources.text import Start
from ..space import Method, resolve_each
from .adapter import Adapter
from .host import Host, host_of, host_on, host_with
from .part import Part


def attach(
    model: PreTrainedModel,
    method: Method | str | Sequence[Method | str],
    name: str = "default",
    *,
    init_ids: Iterable[int] | Tensor | None = None,
    seed: int = 0,
) -> Adapter:
    """Place an adapter on a model, freeze the model's own parameters, and make the adapter the active one.

    The model stays the class that it was. Nothing of it is changed but `requires_grad`, and `detach` restores that.

    Args:
        model: any transformers model that dispatches its attention.
        method: a method, its registry name, or several that compose into one adapter.
        name: of the adapter on this model.
        init_ids: token ids of a text to start from, for methods that start from text; None draws ordinary token ids.
        seed: of that draw and of every random initialisation.

    Returns:
        The adapter's handle.

    Raises:
        ForewordError: the model can't take the method, or has an adapter of that name.
    """
    chosen = resolve_each(method)
    if not chosen:
        raise ForewordError("attach needs at least one method")
    host = host_of(model)
    start = Start(model, host.layout, init_ids, seed)
    return place(host, chosen, name, start)


def place(host: Host, methods: Sequence[Method], name: str, start: Start) -> Adapter:
    """Build `methods` from `start` and install them on the host's model under `name`, active."""
    previous, adapter = host.active, None
    host.activate(None)  # an adapter starts from the base model
    try:
        _require_free(host, name)
        parts = [part for method in methods for part in method.parts(host.layout, start)]
        require_compatible(parts)
        adapter = Adapter(host, name, list(methods), parts)
        adapter.install()
    except Exception:
        if adapter is not None:
            adapter.remove()
        host.activate(previous)
        host.leave_if_empty()
        raise
    host.adapters[name] = adapter
    host.activate(name)
    return adapter


def _require_free(host: Host, name: str) -> None:
    """Raise `ForewordError` for a name that no module can have, or that an adapter has already."""
    if not isinstance(name, str) or not name or "." in name or "@" in name:
        raise ForewordError(f"{name!r} can't name an adapter: a name has at least one character, no dot and no @")
    if name in host.adapters:
        raise ForewordError(f"the model has an adapter {name!r} already; detach it first or choose another name")
    if hasattr(nn.ModuleDict(), name):
        raise ForewordError(f"{name!r} can't name an adapter: torch modules have an attribute of that name")


def require_compatible(parts: Sequence[Part]) -> None:
    """Raise `ForewordError` where two methods of one adapter claim the same place."""
    claimed: dict[tuple[str, str], Part] = {}
    for part in parts:
        for place, what in part.claims():
            first = claimed.setdefault((place, what), part)
            if first is not part:
                names = f"{first.method.name} and {part.method.name}"
                raise ForewordError(f"{names} can't compose: each puts {what} at {place}")


def detach(model: PreTrainedModel, name: str) -> None:
    """Take an adapter off the model. With the last one, the model is as it was before the first."""
    host = host_with(model, name)
    adapter = host.require(name)
    if host.active == name:
        host.activate(None)
    adapter.remove()
    del host.adapters[name]
    host.forget()
    host.leave_if_empty()


def set_active(model: PreTrainedModel, name: str | None) -> None:
    """Choose the adapter that every forward reads; None is the base model, bit for bit."""
    host = host_on(model) if name is None else host_with(model, name)
    if host is not None:
        host.activate(name)


def adapters(model: PreTrainedModel) -> list[str]:
    """Names of the adapters on the model, in the order in which they came."""
    host = host_on(model)
    return [] if host is None else list(host.adapters)
