"""The table of docs/interop.md: each of its rows has a test, and the page has each row."""

from pathlib import Path

import pytest

import foreword as fw
from foreword.convert import FORMATS, export_adapter, import_adapter
from foreword.convert.registry import table

TESTS = Path(__file__).parent
TESTED = {  # format → where its rows are compared with the other library's forward
    "peft": "test_convert_peft.py",
    "adapterhub": "test_convert_adapterhub.py",
    "he-unified": "test_convert_authors.py",
    "p-tuning-v2": "test_convert_authors.py",
    "cartridges": "test_convert_authors.py",
    "llama-adapter": "test_convert_llama_adapter.py",
    "litgpt": "test_convert_llama_adapter.py",
    "parscale": "test_convert_parscale.py",
    "kv-cache": "test_convert_kv_cache.py",
    "merged": "test_convert_command.py",
}


def test_the_page_has_the_table():
    assert table() in (TESTS.parents[1] / "docs" / "interop.md").read_text(), "run `make docs`"


def test_every_format_is_tested():
    assert TESTED.keys() == FORMATS.keys()
    assert all((TESTS / name).exists() for name in TESTED.values())


@pytest.mark.parametrize("name", FORMATS)
def test_directions_are_what_the_format_can_do(name):
    one = FORMATS[name]
    directions = {row.direction for row in one.rows}
    assert bool(directions & {"←", "↔"}) == (one.read is not None or one.attach is not None)
    assert bool(directions & {"→", "↔"}) == (one.write is not None)


def test_methods_of_the_table_are_in_the_registry():
    named = {word.strip(",") for one in FORMATS.values() for row in one.rows for word in row.becomes.split()}
    assert fw.methods().keys() & named == named - {"+", "with", "frozen", "tokens", "one", "task"}


def test_unknown_formats_and_sources(tmp_path):
    import zoo

    model = zoo.make("llama")
    (tmp_path / "notes.txt").write_text("nothing")
    for call, reason in (
        (lambda: import_adapter(model, tmp_path), "can't tell which library"),
        (lambda: import_adapter(model, tmp_path / "no"), "there is no"),
        (lambda: import_adapter(model, tmp_path, format="hf"), "there is no format 'hf'"),
        (lambda: import_adapter(model, tmp_path, format="merged"), "a format to write"),
        (lambda: export_adapter(fw.attach(model, "zero-init"), tmp_path, "litgpt"), "a format to read"),
    ):
        with pytest.raises(fw.ForewordError, match=reason):
            call()
