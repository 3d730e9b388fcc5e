"""Cached folders: built once, checked by hash, whole or absent."""

import multiprocessing
import os
from pathlib import Path

import pytest

from foreword.cache import MANIFEST, cache_root, cached_folder
from foreword.errors import ForewordError


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path))
    return tmp_path


class Builder:
    """Writes two files and keeps a line per build, in a file that processes share."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, folder: Path) -> None:
        with open(self.log, "a") as log:
            log.write("built\n")
        (folder / "a.bin").write_bytes(b"x" * 100_000)
        (folder / "b.json").write_text("{}")

    @property
    def count(self) -> int:
        return self.log.read_text().count("built")


@pytest.fixture
def build(tmp_path):
    return Builder(tmp_path / "log.txt")


def test_root_follows_the_environment(monkeypatch, tmp_path):
    assert cache_root() == tmp_path
    monkeypatch.delenv("FOREWORD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root() == Path("/elsewhere/foreword")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache/foreword"


def test_builds_once(build, root):
    folder = cached_folder("thing", build)
    assert folder == root / "thing"
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "b.json", MANIFEST]
    assert cached_folder("thing", build) == folder
    assert build.count == 1


def truncate(folder: Path) -> None:
    os.truncate(folder / "a.bin", 50_000)


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "a.bin").read_bytes())
    data[70_000] ^= 1
    (folder / "a.bin").write_bytes(data)


def remove_a_file(folder: Path) -> None:
    (folder / "b.json").unlink()


def break_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove_a_file, break_the_manifest])
def test_damage_is_rebuilt(build, damage):
    folder = cached_folder("thing", build)
    damage(folder)
    cached_folder("thing", build)
    assert build.count == 2
    assert (folder / "a.bin").read_bytes() == b"x" * 100_000
    assert (folder / "b.json").read_text() == "{}"
    cached_folder("thing", build)
    assert build.count == 2


def test_a_failed_build_leaves_nothing_and_the_next_one_starts_clean(build, root):
    def fail(folder: Path) -> None:
        (folder / "stray.bin").write_bytes(b"half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        cached_folder("thing", fail)
    assert not (root / "thing").exists()
    assert not (cached_folder("thing", build) / "stray.bin").exists()


def test_processes_at_once_build_once(build):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        folders = pool.starmap(cached_folder, [("thing", build)] * 8)
    assert len(set(folders)) == 1
    assert build.count == 1


def test_a_cache_that_cannot_be_written(build, root, monkeypatch):
    (root / "file").write_text("")
    monkeypatch.setenv("FOREWORD_CACHE", str(root / "file"))
    with pytest.raises(ForewordError, match=r"can't fill .*: set FOREWORD_CACHE"):
        cached_folder("thing", build)
