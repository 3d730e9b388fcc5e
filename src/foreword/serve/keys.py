"""API keys, and what each may use."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import ForewordError
from ..files import read_json

VARIABLE = "FOREWORD_API_KEYS"


@dataclass(frozen=True)
class Access:
    """What a caller may do.

    Attributes:
        adapters: names, or patterns with * and ?, of the adapters that exist for it.
        base: whether it may use the model without an adapter.
        manage: whether it may load and unload those adapters.
    """

    adapters: tuple[str, ...] = ("*",)
    base: bool = True
    manage: bool = True

    def allows(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.adapters)


EVERYTHING = Access()


class Keys:
    """Which key gives which access. Without a key in it, everybody may do everything.

    Args:
        accesses: SHA-256 of each key, and its access.
    """

    def __init__(self, accesses: Sequence[tuple[bytes, Access]] = ()) -> None:
        self._accesses = list(accesses)

    def __bool__(self) -> bool:
        return bool(self._accesses)

    def access(self, key: str | None) -> Access | None:
        """The access of a key, or None. Takes as long for any key of the same length."""
        if not self._accesses:
            return EVERYTHING
        given, found = _digest(key or ""), None
        for digest, access in self._accesses:
            if hmac.compare_digest(digest, given):
                found = access
        return found


def read_keys(path: str | Path | None = None) -> Keys:
    """The keys in a JSON file, or else in the environment variable FOREWORD_API_KEYS, or else none.

    Either holds a list of {"key": …, "adapters": ["support", "acme-*"], "base": true, "manage": false}; `adapters`
    defaults to all, `base` to true and `manage` to false.

    Raises:
        ForewordError: an entry is not of this form, or two have the same key.
    """
    if path is not None:
        return _parse(read_json(path), str(path))
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return Keys()
    try:
        return _parse(json.loads(text), VARIABLE)
    except json.JSONDecodeError as error:
        raise ForewordError(f"{VARIABLE} is not valid JSON: {error.msg} at column {error.colno}") from error


def _parse(entries: Any, where: str) -> Keys:
    if not isinstance(entries, list) or not entries:
        raise ForewordError(f"{where} must hold a list of keys with at least one entry")
    accesses = [_entry(entry, f"{where}, key {number}") for number, entry in enumerate(entries, 1)]
    if len({digest for digest, _ in accesses}) < len(accesses):
        raise ForewordError(f"{where} has the same key twice")
    return Keys(accesses)


def _entry(entry: Any, where: str) -> tuple[bytes, Access]:
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str) or not entry["key"]:
        raise ForewordError(f'{where}: needs "key" with a text')
    unknown = entry.keys() - {"key", "adapters", "base", "manage"}
    if unknown:
        raise ForewordError(f"{where}: unknown field {sorted(unknown)[0]!r}; there are key, adapters, base and manage")
    adapters = entry.get("adapters", ["*"])
    if not isinstance(adapters, list) or not all(isinstance(name, str) for name in adapters):
        raise ForewordError(f'{where}: "adapters" must be a list of names')
    flags = {name: entry.get(name, default) for name, default in (("base", True), ("manage", False))}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ForewordError(f'{where}: "{name}" must be true or false')
    return _digest(entry["key"]), Access(tuple(adapters), **flags)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
