"""A tiny chat model, a document, and a cache folder of the test's own."""

import pytest

import tiny


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with the tiny model."""
    return tiny.save(tmp_path_factory.mktemp("base"))


@pytest.fixture
def text():
    return " ".join(f"On day {day} the ship was {7 * day} miles from the harbour." for day in range(1, 12))
