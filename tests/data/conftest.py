"""Writers of data files, and a tokenizer of bytes that needs no download."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools\nhere') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """`rows` in the format of the path's extension; in CSV, lists become JSON."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            for row in rows:
                cells = {key: v if isinstance(v, str) else json.dumps(v) for key, v in row.items()}
                writer.writerow(cells)
    return path


@pytest.fixture(scope="session")
def write() -> Callable[[Path, list[dict[str, Any]]], Path]:
    return _write


@pytest.fixture(params=[".jsonl", ".json", ".csv", ".parquet"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Writes rows to a file, once for each kind of file."""
    return lambda rows: _write(tmp_path / f"data{request.param}", rows)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes its arguments as the lines of a JSONL file; an argument that is a string is a line as it stands."""

    def lines(*rows: Any) -> Path:
        path = tmp_path / "data.jsonl"
        texts = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("\n".join(texts), encoding="utf-8")
        return path

    return lines


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("FOREWORD_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FOREWORD_DATA names no folder of benchmark files")
    return Path(folder)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a chat template without `{% generation %}` marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, "</s>"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE)
