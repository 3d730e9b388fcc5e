"""Reading a GGUF container: its metadata, and its tensors as float32 arrays.

The container is a header (magic, version, counts), typed key-value metadata, a table of tensors, and the
aligned tensor data: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A tokenizer stores some
100 000 strings in the metadata; `gguf.GGUFReader` makes several numpy views of each, which takes seconds, so
the header is parsed here in one pass. The quantized blocks themselves are decoded by the `gguf` package.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from .errors import ForewordError

_SCALARS: dict[int, str] = {  # struct codes of the scalar types
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


class _Entry(NamedTuple):
    """Where a tensor lies: its shape in row-major order, its block type and its first byte in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int


@dataclass(frozen=True)
class Container:
    """A memory-mapped GGUF file: `metadata` by key, `names` of the tensors, `tensor(name)` their values."""

    metadata: dict[str, Any]
    _entries: dict[str, _Entry]
    _data: mmap.mmap

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def tensor(self, name: str) -> np.ndarray:
        """The dequantized tensor, float32, shape as in PyTorch (rows first)."""
        (*rows, columns), kind, start = self._entries[name]
        values, size = GGML_QUANT_SIZES[kind]  # a block of `size` bytes holds `values` numbers of one row
        shape = (*rows, columns // values * size)
        blocks = np.frombuffer(self._data, np.uint8, int(np.prod(shape)), start).reshape(shape)
        return dequantize(blocks, kind)


class _Cursor:
    """Reads the header from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def unpack(self, codes: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + codes)
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start, self.position = self.position, self.position + length
        return self.data[start : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            item, count = self.unpack("IQ")
            if item in _SCALARS:
                return list(self.unpack(f"{count}{_SCALARS[item]}"))
            return [self.value(item) for _ in range(count)]
        return self.unpack(_SCALARS[kind])[0]


def read(path: str | Path) -> Container:
    """Parse the header of a GGUF file, version 2 or 3. Raises `ForewordError` for any other file."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data)
    magic, version, tensors, pairs = cursor.unpack("4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ForewordError(f"{path} is not a GGUF file of version 2 or 3")
    metadata = {cursor.string(): cursor.value(*cursor.unpack("I")) for _ in range(pairs)}

    entries = {}
    for _ in range(tensors):
        name, (dimensions,) = cursor.string(), cursor.unpack("I")
        *shape, kind, offset = cursor.unpack(f"{dimensions}QIQ")
        entries[name] = _Entry(tuple(reversed(shape)), GGMLQuantizationType(kind), offset)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    first = -(-cursor.position // alignment) * alignment  # offsets count from the aligned end of the header
    entries = {name: entry._replace(start=first + entry.start) for name, entry in entries.items()}
    return Container(metadata, entries, data)
