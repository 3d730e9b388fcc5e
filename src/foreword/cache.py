"""Folders that are computed once and kept in the user's cache directory."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from .errors import ForewordError
from .files import read_json, write_json

MANIFEST = "manifest.json"  # the SHA-256 of every other file of the folder


def cache_root() -> Path:
    """`$FOREWORD_CACHE`, else `$XDG_CACHE_HOME/foreword`, else `~/.cache/foreword`."""
    if chosen := os.environ.get("FOREWORD_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foreword"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, filled by `build(folder)` where it is absent or damaged.

    `build` puts files, no folders, into a folder beside the final one, which is renamed when it is complete,
    under a lock: of several processes one builds and the others wait for it. Every call compares the files
    with the hashes recorded when they were written. Raises `ForewordError` where the cache can't be written.
    """
    target = cache_root() / name
    try:
        if _intact(target):  # the usual case needs no lock, so that a read-only cache will do
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f"{name}.lock")):
            if not _intact(target):
                partial = target.with_name(f"{name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
                partial.mkdir()
                build(partial)
                write_json(partial / MANIFEST, _digests(partial))
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
    except OSError as error:
        reason = error.strerror or error
        raise ForewordError(f"can't fill {target} ({reason}): set FOREWORD_CACHE to a folder with room") from error
    return target


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def _intact(folder: Path) -> bool:
    try:
        return read_json(folder / MANIFEST) == _digests(folder)
    except ForewordError:  # no manifest, or not JSON
        return False
