"""Rows out of JSONL, JSON, CSV and Parquet files, each with its place in the file for error messages."""

import codecs
import csv
import io
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ForewordError

# lists, which a CSV cell holds as JSON
_JSON_CELLS = frozenset({"messages", "conversations", "choices", "endings", "mc1_targets"})


@dataclass(frozen=True)
class Row:
    """One record and its place in a file, as in "line 3": `unit` and `number`. Null fields are left out."""

    file: Path
    unit: str
    number: int
    fields: dict[str, Any]

    def error(self, message: str) -> ForewordError:
        return ForewordError(f"{self.file}, {self.unit} {self.number}: {message}")

    def text(self, field: str, *, required: bool = True) -> str:
        """The string in `field`. A required one is neither missing nor blank; else a missing one is ""."""
        value = self.fields.get(field)
        if value is None and not required:
            return ""
        return self.string(value, f"field {field!r}", blank=not required)

    def string(self, value: Any, what: str, *, blank: bool = False) -> str:
        """`value`, if it is a well-formed string (and not a blank one, unless `blank`)."""
        if not isinstance(value, str):
            raise self.error(f"{what} {describe(value)}; it must be a string")
        if not blank and not value.strip():
            raise self.error(f"{what} is empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"{what} holds half of a surrogate pair, which is not text") from None
        return value


def describe(value: Any) -> str:
    """ "is missing", or "is 3 (int)" with a long value cut short, for the middle of an error message."""
    return "is missing" if value is None else f"is {reprlib.repr(value)} ({type(value).__name__})"


def read(path: str | Path, split: str | None = None) -> list[Row]:
    """The rows of a data file, in order.

    Args:
        path: a `.jsonl`, `.json` (a list of objects, or an object that holds it), `.csv` or `.parquet` file,
            or a folder with one such file for each split, named after it (`train.jsonl`, `test.jsonl`).
        split: which file of a folder, or which list of a JSON object with several.

    Raises:
        ForewordError: names the file and the line (JSONL, CSV), item (JSON) or row (Parquet), from 1.
    """
    file = Path(path)
    if not file.exists():
        raise ForewordError(f"{file} does not exist")
    if file.is_dir():
        file, split = _choose(file, split), None
    parse = _PARSERS.get(file.suffix.lower())
    if parse is None:
        raise ForewordError(f"{file} has an unknown extension; data files end in {', '.join(_PARSERS)}")
    rows = [_row(file, *numbered) for numbered in parse(file, split)]
    if not rows:
        raise ForewordError(f"{file} holds no rows")
    return rows


def _row(file: Path, unit: str, number: int, value: Any) -> Row:
    row = Row(file, unit, number, {})
    if not isinstance(value, dict):
        raise row.error(f"the row {describe(value)}; it must be an object with named fields")
    return replace(row, fields={key: field for key, field in value.items() if field is not None})


def _choose(path: Path, split: str | None) -> Path:
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in _PARSERS)
    if not files:
        raise ForewordError(f"{path} is a folder without {', '.join(_PARSERS)} files")
    chosen = [file for file in files if file.stem == split]
    if len(chosen) != 1:
        have = ", ".join(file.name for file in files)
        raise ForewordError(f"{path} is a folder with {len(chosen)} files for split {split!r}; it has {have}")
    return chosen[0]


# --- one parser per extension: (file, split) -> (unit, number from 1, value) --------------------------------

Numbered = Iterator[tuple[str, int, Any]]


def _jsonl(file: Path, split: str | None) -> Numbered:
    _refuse_split(file, split)
    lines = _decode(file).split("\n")  # splitlines() would also cut at U+2028, which JSON allows in a string
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield "line", number, _loads(line, f"{file}, line {number}")


def _json(file: Path, split: str | None) -> Numbered:
    value = _loads(_decode(file), str(file), document=True)
    if isinstance(value, dict):
        lists = {key: item for key, item in value.items() if isinstance(item, list) and split in (None, key)}
        if len(lists) != 1:
            wanted = "one list of rows" if split is None else f"a list named {split!r}"
            raise ForewordError(f"{file} is an object with the fields {_names(value)}; it must hold {wanted}")
        [value] = lists.values()
    else:
        _refuse_split(file, split)
    if not isinstance(value, list):
        raise ForewordError(f"{file} {describe(value)}; it must be a list of objects")
    for number, item in enumerate(value, start=1):
        yield "item", number, item


def _csv(file: Path, split: str | None) -> Numbered:
    _refuse_split(file, split)
    csv.field_size_limit(2**31 - 1)  # the module's own limit of 128 KiB is less than a long document
    reader = csv.reader(io.StringIO(_decode(file), newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ForewordError(f"{file}, line 1: a column name occurs twice in the header {_names(header)}")
        start = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                counts = f"{len(cells)} cells, but the header names {len(header)} columns"
                raise ForewordError(f"{file}, line {start}: has {counts}")
            if cells:
                fields: dict[str, Any] = dict(zip(header, cells, strict=True))
                for key in _JSON_CELLS & fields.keys():
                    if fields[key].lstrip().startswith(("[", "{")):
                        fields[key] = _loads(fields[key], f"{file}, line {start}: field {key!r}")
                yield "line", start, fields
            start = reader.line_num + 1
    except csv.Error as error:
        raise ForewordError(f"{file}, line {max(reader.line_num, 1)}: not valid CSV: {error}") from error


def _parquet(file: Path, split: str | None) -> Numbered:
    import pyarrow as pa
    import pyarrow.parquet as pq

    _refuse_split(file, split)
    try:
        rows = pq.ParquetFile(file).read().to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ForewordError(f"{file} is not a readable Parquet file: {reason}") from error
    for number, fields in enumerate(rows, start=1):
        yield "row", number, fields


_PARSERS: dict[str, Callable[[Path, str | None], Numbered]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _refuse_split(file: Path, split: str | None) -> None:
    if split is not None:
        raise ForewordError(f"{file} has no split {split!r}; name a folder that has a file for each split")


def _decode(file: Path) -> str:
    try:
        data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ForewordError(f"{file}, line {line}: not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ForewordError(f"can't read {file}: {error.strerror}") from error


def _loads(text: str, where: str, *, document: bool = False) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if document else f"column {error.colno}"
        hint = "; one object a line makes a .jsonl file" if document and error.msg == "Extra data" else ""
        raise ForewordError(f"{where}: not valid JSON: {error.msg} at {place}{hint}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, endless nesting
        raise ForewordError(f"{where}: not readable JSON: {error}") from error


def _names(keys: Iterable[Any]) -> str:
    return reprlib.repr(list(keys))
