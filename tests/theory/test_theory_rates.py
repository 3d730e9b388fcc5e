"""The experiments end to end, small: tables that count everything, runs that continue, figures."""

import json

import pytest

from foreword.cells import Cell
from foreword.errors import ForewordError
from foreword.theory import gates as gate_experiments
from foreword.theory import plots
from foreword.theory.gates import gates
from foreword.theory.rates import THEORY, measure, rates

SMALL = {
    "settings": ("random-init", "zero-linear", "zero-free"),
    "n": (100, 400),
    "replicates": 6,
    "starts": 2,
    "max_iterations": 60,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rates")
    return folder, rates(**SMALL, block=3, output=folder, workers=1)


def test_every_replicate_is_in_the_table(small):
    _, result = small
    assert len(result["table"]) == 3 * 2 * 2
    for row in result["table"]:
        assert row["converged"] + row["failed"] + row["lost"] == row["replicates"] == 6
        assert 0 <= row["degenerate"] <= 6
    assert result["failed_cells"] is None


def test_slopes_stand_beside_the_theory(small):
    _, result = small
    rows = {(row["setting"], row["surplus"], row["error"]): row for row in result["slopes"]}
    exact = rows["zero-linear", 0, "f"]
    assert exact["theory"] == THEORY["f"]
    assert exact["all"]["low"] <= exact["all"]["slope"] <= exact["all"]["high"]
    assert -1.0 < exact["all"]["slope"] < -0.2
    assert rows["zero-linear", 1, "doubled"]["theory"] == -0.25
    assert rows["zero-free", 1, "doubled"]["theory"] is None
    assert ("random-init", 0, "gate") not in rows


def test_results_and_figures_are_written(small):
    folder, result = small
    assert json.loads((folder / "rates.json").read_text()) == json.loads(json.dumps(result))
    assert (folder / "rates.svg").read_text().lstrip().startswith("<?xml")
    assert (folder / "rates.png").stat().st_size > 10_000
    page = (folder / "report.html").read_text()
    assert "Estimation rates" in page
    assert all(setting in page for setting in SMALL["settings"])


def test_the_best_start_of_a_pilot_ends_where_all_starts_do():
    asked = {"n": 2000, "surplus": 0, "first": 0, "count": 4, "starts": 3, "start_scale": 0.3, "max_iterations": 100}
    for setting in ("random-init", "zero-linear", "zero-free"):
        whole, piloted = (measure(setting, **asked, pilot=pilot, seed=0, problem=0) for pilot in (2000, 500))
        assert piloted["f"] == pytest.approx(whole["f"], rel=1e-2)
        assert piloted["converged"] == [True] * 4


def test_a_run_continues_and_ends_with_the_same_table(small, tmp_path):
    folder, result = small
    (tmp_path / "cells").mkdir()
    kept = sorted((folder / "cells").glob("*.json"))[::3]
    for path in kept:
        (tmp_path / "cells" / path.name).write_bytes(path.read_bytes())
    stamps = {path.name: (tmp_path / "cells" / path.name).stat().st_mtime_ns for path in kept}
    again = rates(**SMALL, block=3, output=tmp_path, workers=1, plot=False)
    assert again["table"] == result["table"]
    assert again["slopes"] == result["slopes"]
    assert all((tmp_path / "cells" / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())


def test_a_search_that_is_cut_short_is_counted_as_failed(tmp_path):
    asked = {**SMALL, "settings": ("zero-linear",), "over_specified": (1,)}
    result = rates(**{**asked, "max_iterations": 2}, output=tmp_path, workers=1, plot=False)
    assert [row["failed"] for row in result["table"]] == [6, 6]
    assert all(row["f"] is not None for row in result["table"])


def test_a_lost_cell_is_counted(tmp_path, monkeypatch):
    def breaks(**arguments):
        if arguments["n"] == 400:
            raise RuntimeError("no memory")
        return measure(**arguments)

    breaks.__module__, breaks.__qualname__ = measure.__module__, measure.__qualname__
    cell = Cell
    monkeypatch.setattr("foreword.theory.rates.Cell", lambda name, _, *rest, **more: cell(name, breaks, *rest, **more))
    result = rates(**SMALL, output=tmp_path, workers=1, plot=False)
    assert {row["n"] for row in result["table"]} == {100}
    assert "6 of 12 cells failed" in result["failed_cells"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"settings": ("zero",)}, "unknown setting 'zero'"),
        ({"over_specified": (9,)}, "from 0 to 4"),
        ({"n": "many"}, "give a range"),
        ({"replicates": 0}, "must be 1 or more"),
    ],
)
def test_mistakes(tmp_path, wrong, message):
    with pytest.raises(ForewordError, match=message):
        rates(**{**SMALL, **wrong}, output=tmp_path)


def test_a_missing_matplotlib_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ForewordError, match="pip install"):
        rates(**SMALL, output=tmp_path)
    assert not (tmp_path / "cells").exists()


@pytest.fixture(scope="module")
def small_gates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_experiments, "OPENING", {"n": 200, "replicates": 2, "starts": 4})
        result = gates(
            settings=("zero-linear", "zero-free"),
            strengths=(0.7, 0.0),
            n=(200, 800),
            replicates=4,
            starts=2,
            held=(0.4, 0.7),
            points=256,
            output=folder,
            workers=1,
        )
    return folder, result


def test_prompts_behind_a_closed_gate_are_never_learned(small_gates):
    _, result = small_gates
    rows = {(row["setting"], row["gate_strength"], row["n"]): row for row in result["strength"]}
    assert rows["zero-linear", 0.7, 800]["prompts"] < 0.1
    assert rows["zero-linear", 0.0, 800]["prompts"] > 0.5


def test_free_values_take_over_any_gate_and_shared_prompts_do_not(small_gates):
    _, result = small_gates
    risk = {row["setting"]: row["risk"] for row in result["confounding"]}
    assert max(risk["zero-free"]) < 1e-20
    wrong, right = risk["zero-linear"]
    assert right < 1e-20
    assert wrong > 1e-5


def test_every_search_is_counted_and_drawn(small_gates):
    folder, result = small_gates
    for row in result["opening"]:
        assert row["reached"] + row["elsewhere"] + row["failed"] == row["searches"] == 8
    assert (folder / "gates.svg").exists()
    assert plots.ERRORS.keys() == THEORY.keys()


def test_a_setting_without_a_gate_is_refused(tmp_path):
    with pytest.raises(ForewordError, match="random-init has no gate"):
        gates(settings=("random-init",), output=tmp_path)
