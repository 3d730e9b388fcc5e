"""The values of a YAML file with their places, so that a mistake is named in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ..errors import ForewordError

_MISSING = object()


class Fields:
    """A mapping of the file, whose fields are taken one after the other; `done` refuses those that nobody took."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise ForewordError(f"{where} is {_shown(values)}; it must be a mapping")
        self.values = {str(name): value for name, value in values.items()}
        self.where = where
        self._known: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def place(self, name: str) -> str:
        return f"{self.where}: {name}"

    def error(self, name: str, wanted: str) -> ForewordError:
        return ForewordError(f"{self.place(name)} is {_shown(self.values.get(name))}; it must be {wanted}")

    def take(self, name: str, fits: Callable[[Any], bool], wanted: str, default: Any = _MISSING) -> Any:
        """The value of a field that `fits`, or `default` where the field is absent."""
        self._known.append(name)
        if name not in self.values:
            if default is _MISSING:
                raise ForewordError(f"{self.place(name)} is missing; it must be {wanted}")
            return default
        if not fits(self.values[name]):
            raise self.error(name, wanted)
        return self.values[name]

    def text(self, name: str, default: Any = _MISSING) -> Any:
        return self.take(name, lambda value: isinstance(value, str) and value != "", "a text", default)

    def count(self, name: str, default: Any = _MISSING) -> Any:
        return self.take(name, is_count, "a positive integer", default)

    def choice(self, name: str, *choices: Any) -> Any:
        """One of `choices`, by default the first."""
        wanted = " or ".join("true" if one is True else "false" if one is False else one for one in choices)
        return self.take(name, lambda value: any(value is one or value == one for one in choices), wanted, choices[0])

    def mapping(self, name: str, wanted: str, default: Any = _MISSING) -> Any:
        """The fields of a mapping, or `default` where there is none."""
        value = self.take(name, lambda one: isinstance(one, dict), wanted, default)
        return Fields(value, self.place(name)) if isinstance(value, dict) else value

    def done(self) -> None:
        """Raise `ForewordError` for the first field that was not taken."""
        for name in self.values:
            if name not in self._known:
                raise ForewordError(f"{self.where} has no field {name!r}; it has {', '.join(self._known)}")


def read_yaml(path: Path) -> Fields:
    """The mapping in a YAML file. Raises `ForewordError` naming the file and line where it is not one."""
    try:
        return Fields(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except yaml.YAMLError as error:
        raise ForewordError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ForewordError(f"can't read {path}: {error}") from error


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list, not empty and without repetitions, whose entries all fit."""
    return lambda value: (
        isinstance(value, list) and bool(value) and all(map(fits, value)) and len(set(map(repr, value))) == len(value)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
