"""Files that are either whole or absent."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import ForewordError


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; rename it over `target` when the block succeeds.

    A reader sees the old file or the new one, never half of either. When the block raises, the temporary file is
    removed and `target` is as it was. Raises `ForewordError` where the folder can't be written.
    """
    target = Path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise ForewordError(f"can't write {target}: {error.strerror or error}") from error
    os.close(handle)
    temporary = Path(name)
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o666 & ~umask)  # mkstemp makes private files; keep what open() would have given
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise ForewordError(f"can't write {target}: {error.strerror or error}") from error
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def write_text(target: str | Path, text: str) -> Path:
    """Write `text` to `target` atomically and return the path."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(target)


def write_json(target: str | Path, value: Any) -> Path:
    """Write `value` as indented JSON to `target` atomically and return the path."""
    return write_text(target, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """The JSON value in `path`. Raises `ForewordError` naming the file and the line where it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ForewordError(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ForewordError(f"can't read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ForewordError(f"{path} is not valid JSON: {error.msg} at line {error.lineno}") from error
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
        raise ForewordError(f"can't read {path}: {error}") from error
