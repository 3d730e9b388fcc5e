"""The GGUF reader against the `gguf` package, on a small file with every kind of value."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from foreword import gguf_reader
from foreword.errors import ForewordError


@pytest.fixture(params=[32, 64], ids=lambda alignment: f"alignment={alignment}")
def path(request, tmp_path):
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(request.param)
    for kind, value in {
        GGUFValueType.UINT8: 200,
        GGUFValueType.INT8: -100,
        GGUFValueType.UINT16: 60_000,
        GGUFValueType.INT16: -30_000,
        GGUFValueType.UINT32: 4_000_000_000,
        GGUFValueType.INT32: -2_000_000_000,
        GGUFValueType.FLOAT32: 0.1,
        GGUFValueType.BOOL: True,
        GGUFValueType.STRING: "naïve 你好",
        GGUFValueType.UINT64: 2**63,
        GGUFValueType.INT64: -(2**62),
        GGUFValueType.FLOAT64: 0.1,
    }.items():
        writer.add_key_value(f"test.{kind.name}", value, kind)
    writer.add_array("test.strings", ["a", "", "bc"])
    writer.add_array("test.integers", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -1.5])
    numbers = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    for kind in (GGMLQuantizationType.F16, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        writer.add_tensor(f"{kind.name}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("vector.weight", numbers[0, :5].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata(path):
    expected = {
        key: field.contents()
        for key, field in gguf.GGUFReader(path).fields.items()
        if not key.startswith("GGUF.")  # the reader's names for the header's counts
    }
    assert gguf_reader.read(path).metadata == expected


def test_tensors(path):
    container = gguf_reader.read(path)
    reference = gguf.GGUFReader(path).tensors
    assert container.names == [tensor.name for tensor in reference]
    for tensor in reference:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(container.tensor(tensor.name), expected)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * 64)
    with pytest.raises(ForewordError, match=r"model\.safetensors is not a GGUF file"):
        gguf_reader.read(path)
