"""The generated pages are those of the registry as it is."""

import importlib.util
from pathlib import Path

import pytest

import foreword as fw

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("make_docs", DOCS / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("docs")
    return folder, module.write(folder)


def test_pages_are_up_to_date(written):
    folder, files = written
    stale = [file.name for file in files if (DOCS / file.relative_to(folder)).read_text() != file.read_text()]
    assert not stale, "run `make docs`"


def test_every_method_has_a_page_and_stands_in_the_design_space():
    space = (DOCS / "design-space.md").read_text()
    for name in fw.methods():
        assert (DOCS / "methods" / f"{name}.md").exists()
        assert f"(methods/{name}.md)" in space


def test_every_field_is_described(written):
    folder, _ = written
    for page in (folder / "methods").glob("*.md"):
        assert "` |  |" not in page.read_text(), page.name


def test_links_between_pages_lead_somewhere():
    import re

    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
