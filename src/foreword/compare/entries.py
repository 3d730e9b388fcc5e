"""Methods under comparison, as a study's YAML names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ForewordError
from ..space import Method, from_dict, resolve
from .fields import Fields, is_positive


@dataclass(frozen=True)
class Entry:
    """A method under comparison.

    Attributes:
        name: in tables.
        methods: what is attached; several compose, none is the frozen model.
        learning_rate: None for the method's own, or the sweep's choice.
        fit: whether an equal-parameter budget sizes it.
    """

    name: str
    methods: tuple[Method, ...]
    learning_rate: float | None = None
    fit: bool = True


def read_entry(name: str, value: Any, where: str) -> Entry:
    """The entry called `name`: a registry name, fields, a list of methods, or null for the frozen model.

    Raises `ForewordError` that begins with `where` and names the field that is wrong.
    """
    if value is None:
        return Entry(name, ())
    fields = Fields({"methods": [value]} if isinstance(value, str) else _as_mapping(value), where)
    rate = fields.take("learning_rate", is_positive, "a positive number", None)
    fit = fields.choice("fit", True, False)
    rest = {key: one for key, one in fields.values.items() if key not in ("learning_rate", "fit")}
    listed = rest.pop("methods", None)
    if listed is not None and rest:
        raise ForewordError(f"{where}: {next(iter(rest))!r} belongs into one of the methods")
    try:
        chosen = [rest] if listed is None else listed
        methods = tuple(resolve(one) if isinstance(one, str) else from_dict(one) for one in chosen)
    except ForewordError as error:
        raise ForewordError(f"{where}: {error}") from error
    return Entry(name, methods, rate, fit)


def _as_mapping(value: Any) -> Any:
    return {"methods": value} if isinstance(value, list) else value
