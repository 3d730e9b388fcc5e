"""Every method on every architecture is right in everything that a user may do, or refused with a clear error."""

import pytest

import conformance
import foreword as fw
import zoo
from conformance import CHECKS, NotApplicable, fresh_case, small
from conformance_matrix import DOCUMENT, cells_of, read_table
from surroundings import State, assert_unchanged, is_one_line, refusal

METHODS = sorted(fw.methods())


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", zoo.ZOO)
def test_cell(architecture, method, check):
    error = refusal(fresh_case, architecture, method)
    if error is not None:
        assert is_one_line(error)
        pytest.skip(f"refused: {error}")
    case = fresh_case(architecture, method)
    try:
        CHECKS[check](case)
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", zoo.UNREACHABLE)
def test_unreachable_attention_is_refused(architecture, method):
    """The error names the model and its layers, and nothing of the model has changed."""
    model = zoo.make(architecture)
    before = State.of(model)
    error = refusal(fw.attach, model, small(method))
    assert is_one_line(error)
    assert type(model).__name__ in str(error)
    assert "Attention" in str(error)
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", METHODS)
def test_the_table_in_the_docs_is_current(method):
    """Each architecture has a row, each method a column, and a cell says "refused" where `attach` refuses."""
    table = read_table(DOCUMENT.read_text(encoding="utf-8"))
    assert list(table) == [*zoo.ZOO, *zoo.UNREACHABLE]
    for architecture, row in table.items():
        assert list(row) == METHODS
        refused = refusal(fresh_case, architecture, method) is not None
        assert row[method].startswith("refused" if refused else "✓"), (architecture, method)


def test_the_matrix_says_what_is_wrong(monkeypatch):
    def wrong(case):
        raise AssertionError

    def meaningless(case):
        raise NotApplicable("for a reason")

    monkeypatch.setattr(conformance, "CHECKS", {"right": lambda case: None, "wrong": wrong, "meaningless": meaningless})
    (cell,) = cells_of("llama", ["zero-init"])
    assert (cell.right, cell.wrong, cell.refusal) == (1, ["wrong"], None)
    assert cell.mark([]) == "✗ wrong"
    (cell,) = cells_of("bloom", ["zero-init"])
    notes: list[str] = []
    assert cell.mark(notes) == "refused [^1]"
    assert notes == [cell.refusal]
