"""The design space: every method is a point on four axes, and a registry name.

    source      where the extra keys and values come from        foreword.sources
    combine     how they meet the tokens' attention              foreword.combines
    site        which layers, which attention; a sublayer        `layers`, `attention`, `site`; foreword.model.layout
    aggregate   what joins several rows of a batch into one      none, but for ParScale

A method is a frozen dataclass in `foreword.methods`, one paper a file. Its fields are its hyperparameters: the flags
of the command line, the keys of a YAML file and of an adapter's JSON. A point that no paper named is `Point(source=…,
combine=…)`.

Shapes everywhere: B batch, T text tokens, S keys, H query heads, G key/value heads, D head width, d hidden width, l
prefix tokens, L layers.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType, UnionType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import nn

from . import combines, sources
from .errors import ForewordError
from .model.layout import Block, Layout, Site
from .model.part import Part
from .model.slot import Prefix
from .sources.text import Start

Layers = int | Sequence[int] | Literal["upper"] | None  # see `Layout.select`


class Source(Protocol):
    """Where keys and values come from.

    `build` returns a module that is evaluated once a forward (or None), and a module for each site, whose
    `forward(site, shared)` gives keys (G, l, D_k) and values (G, l, D_v). A site's module that is a
    reparameterisation has `fold(site, shared)`, which returns the module of its stored form.

    Attributes:
        length: l, prefix tokens.
        in_context: whether the prefix stands for tokens before the text, so that text positions follow it.
    """

    @property
    def length(self) -> int: ...

    @property
    def in_context(self) -> bool: ...

    def build(self, sites: list[Site], start: Start) -> tuple[nn.Module | None, dict[Site, nn.Module]]: ...


class Combine(Protocol):
    """How the prefix meets the tokens' attention; `build` returns the module of one site with H query heads."""

    def build(self, num_heads: int) -> nn.Module: ...


@dataclass(frozen=True)
class Count:
    """How many numbers training changes, and how many inference needs."""

    trainable: int
    stored: int

    def __add__(self, other: Count) -> Count:
        return Count(self.trainable + other.trainable, self.stored + other.stored)


@dataclass(frozen=True)
class Method:
    """A configuration that can be placed on a model; a subclass is one method of the registry.

    A subclass sets `name` (in the registry, on the command line, in adapter files), `citation` and `learning_rate`
    (AdamW's, the default of training), `size` (the field that its parameters grow with; None where there is none),
    and defines one of
        `point`     where the method is a source of keys and values with a way to combine them,
        `build`     where it places other modules,
        `compose`   where it is several methods at once.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    learning_rate: ClassVar[float] = 1e-3
    size: ClassVar[str | None] = None

    def parts(self, layout: Layout, start: Start) -> list[Part]:
        """Make the method's modules for a surveyed model. Raises `ForewordError` where it can't be served."""
        composed = self.compose()
        if composed == [self]:
            return [self.build(layout, start)]
        return [part for method in composed for part in method.parts(layout, start)]

    def compose(self) -> list[Method]:
        """The methods that this one consists of: itself, but for a composition."""
        return [self]

    @property
    def least_size(self) -> int:
        """The smallest number of its field `size` that leaves something to train."""
        return 1

    def at_size(self, size: int) -> Method:
        """The same with its field `size` at that number; a composition takes the sizes of its parts along."""
        return replace(self, **{str(self.size): size})

    def build(self, layout: Layout, start: Start) -> Part:
        """The modules of a method that is no composition."""
        return self.point().place(self, layout, start)

    def point(self) -> Point:
        """The method's place in the design space."""
        raise NotImplementedError

    def count(self, layout: Layout) -> Count:
        """Trainable and stored parameters by the method's formula, without building it."""
        composed = self.compose()
        if composed == [self]:
            raise ForewordError(f"{self.name} has no formula for its parameters; attach it and ask the adapter")
        return sum((method.count(layout) for method in composed), Count(0, 0))

    def to_dict(self) -> dict[str, Any]:
        """{"method": name, field: value, …}, ready for JSON; `from_dict` is the way back."""
        return {"method": self.name, **_fields(self)}


def in_proportion(value: int, size: int, usual: int) -> int:
    """`value` of a part where the composition has `size` in place of its `usual` one."""
    return max(1, round(value * size / usual))


def own_rate(methods: Sequence[Method]) -> float:
    """The learning rate of methods that compose: the lowest default, since a rate too high is the worse mistake."""
    return min(method.learning_rate for method in methods)


@dataclass(frozen=True)
class Point(Method):
    """Any source with any combine at any attention: a point of the space, whether a paper named it or not.

    Example:
        fw.attach(model, fw.Point(fw.sources.NonLinear(length=10), fw.combines.Joint(), attention="cross"))

    Args:
        source: where keys and values come from, one of `foreword.sources`.
        combine: how they meet the tokens' attention, one of `foreword.combines`.
        layers: None for every layer, n for the top n attention layers, a list of layer numbers, or "upper" for all but
            the lowest two.
        attention: "all", or some of "self", "cross", "encoder" joined by "+".
        dropout: on the keys and values, in training.
        text_positions: where a model looks its positions up and the prefix is in the softmax, whether text positions
            count on "after" the prefix or are the text's "own", from 0; "usual" is "after" in decoders, with a source
            that is in context, and "own" elsewhere. The others are for prefixes that were trained so.
    """

    name: ClassVar[str] = "point"
    citation: ClassVar[str] = ""
    learning_rate: ClassVar[float] = 3e-2  # of the prefixes that a sweep was made for

    source: Source
    combine: Combine
    layers: Layers = None
    attention: str = "all"
    dropout: float = 0.0
    text_positions: Literal["usual", "after", "own"] = "usual"

    def point(self) -> Point:
        return self

    def place(self, method: Method, layout: Layout, start: Start) -> Part:
        """Build the source and the combine at every chosen site, on behalf of `method`."""
        require_positive(self.source, "length")
        sites = layout.select(self.layers, self.attention)
        shared, modules = self.source.build(sites, start)
        prefixes: dict[Site | Block, nn.Module] = {
            site: Prefix(modules[site], self.combine.build(site.num_heads), self.dropout) for site in sites
        }
        in_softmax = all(prefix.joins_softmax for prefix in prefixes.values())  # only there it can stand for tokens
        moves_text = layout.absolute_positions and self.source.in_context
        if self.text_positions != "usual":
            moves_text = self.text_positions == "after"
        if moves_text and not layout.absolute_positions and layout.position_embedding is None:
            raise ForewordError(f'text_positions="after": {type(layout.model).__name__} has no table of positions')
        return Part(method, shared, prefixes, shift=self.source.length if moves_text and in_softmax else 0)


# ---------------------------------------------------------------------------------------------------------------------
# The registry

_registry: dict[str, type[Method]] = {}
MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method: MethodClass) -> MethodClass:
    """Class decorator: make a method known under its `name` to the command line, adapter files, tests and docs."""
    _registry[method.name] = method
    return method


def methods() -> Mapping[str, type[Method]]:
    """Every registered method by name."""
    return MappingProxyType(_registry)


def resolve(method: Method | str) -> Method:
    """A method, or a registry name with its defaults. Raises `ForewordError` for an unknown name."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise ForewordError(f"{method!r} is neither a method nor the name of one")
    return method_class(method)()


def resolve_each(method: Method | str | Sequence[Method | str]) -> list[Method]:
    """The methods of one adapter, given as one or as several that compose. Raises as `resolve`."""
    chosen: list[Any] = list(method) if isinstance(method, (list, tuple)) else [method]
    return [resolve(one) for one in chosen]


def method_class(name: str) -> type[Method]:
    """The class registered under `name`. Raises `ForewordError` with the nearest names where there is none."""
    if name not in _registry:
        near = difflib.get_close_matches(name, _registry, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the methods are {', '.join(sorted(_registry))}"
        raise ForewordError(f"there is no method {name!r}; {hint}")
    return _registry[name]


def from_dict(values: Mapping[str, Any]) -> Method:
    """The method that `to_dict` wrote. Raises `ForewordError` naming an unknown method or field."""
    fields = dict(values) if isinstance(values, Mapping) else {}
    name = fields.pop("method", None)
    if not isinstance(name, str):
        raise ForewordError('a method must be an object that has the key "method" with its name')
    if name == Point.name:
        fields["source"] = _axis(sources, fields, "source")
        fields["combine"] = _axis(combines, fields, "combine")
        return _construct(Point, fields)
    return _construct(method_class(name), fields)


def require_positive(config: Any, *names: str) -> None:
    """Raise `ForewordError` for the first of the named fields that is not a positive integer."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ForewordError(f"{type(config).__name__}: {name} must be a positive integer, not {value!r}")


def require_choice(config: Any, **choices: tuple) -> None:
    """Raise `ForewordError` for the first field whose value is not among its choices."""
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ForewordError(f"{type(config).__name__}: {name} must be one of {allowed}, not {value!r}")


def _construct(config_class: type[Any], fields: dict[str, Any]) -> Any:
    known = {f.name for f in dataclasses.fields(config_class)}
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise ForewordError(f"{config_class.__name__} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    hints = get_type_hints(config_class)
    for key, value in fields.items():
        if not _fits(value, hints[key]):
            kind = hints[key].__name__ if isinstance(hints[key], type) else re.sub(r"\b(\w+\.)+", "", str(hints[key]))
            raise ForewordError(f"{config_class.__name__}: {key} must be {kind}, not {value!r}")
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    try:
        return config_class(**frozen)
    except TypeError as error:
        raise ForewordError(f"{config_class.__name__}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value out of a JSON file is of the type that a field has."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is Sequence:
        return isinstance(value, (list, tuple)) and all(_fits(one, arguments[0]) for one in value)
    if hint in (Source, Combine):  # made by `_axis`
        return dataclasses.is_dataclass(value)
    if hint is float:
        return _fits(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _axis(package: ModuleType, fields: dict[str, Any], axis: str) -> Any:
    if not isinstance(fields.get(axis), Mapping):
        raise ForewordError(f'a point must have a {axis}, an object that has the key "class"')
    values = dict(fields[axis])
    name = values.pop("class", None)
    if name not in package.__all__:
        raise ForewordError(f"there is no {axis} {name!r}; there are {', '.join(package.__all__)}")
    return _construct(getattr(package, name), values)


def _fields(config: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {"class": type(value).__name__, **_fields(value)}
    return list(value) if isinstance(value, (tuple, list)) else value
