"""The grid runner: resuming, failing, dying workers, folders of cells, and the backends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foreword import cells
from foreword.cells import Cell, failures, run_cells
from foreword.errors import ForewordError


def square(x, log=None):
    if log:
        with open(log, "a") as file:
            file.write(f"{x}\n")
    return {"square": x * x, "pair": (x, x)}


def fail(x):
    raise ArithmeticError(f"no root of {x}")


def die(x):
    os.kill(os.getpid(), signal.SIGKILL)


def not_json(x):
    return {"value": float("nan")}


def append_to_own_folder(x, folder):
    (folder / "steps.txt").open("a").write(f"{x}\n")
    if not (folder / "second").exists():
        (folder / "second").touch()
        raise RuntimeError("interrupted")
    return (folder / "steps.txt").read_text().split()


def fail_slowly_at_first(x, folder):
    if not (folder / "tried").exists():
        (folder / "tried").touch()
        time.sleep(0.1)
        raise RuntimeError("interrupted")
    return x


def torch_threads():
    import torch

    return torch.get_num_threads()


def grid(function=square, count=4, **arguments):
    return [Cell(f"x{x}", function, {"x": x, **arguments}) for x in range(count)]


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_back_in_order_and_lie_in_the_folder(tmp_path, workers):
    outcomes = run_cells(grid(), tmp_path, workers=workers)
    assert [outcome.result for outcome in outcomes] == [{"square": x * x, "pair": [x, x]} for x in range(4)]
    record = json.loads((tmp_path / "cells" / "x3.json").read_text())
    assert record["result"]["square"] == 9
    assert record["arguments"] == {"x": 3}
    assert record["function"].endswith("test_cells:square")
    assert failures(outcomes) is None


def test_a_second_run_computes_only_what_is_missing_or_changed(tmp_path):
    log = str(tmp_path / "log")
    run_cells(grid(log=log), tmp_path, workers=1)
    (tmp_path / "cells" / "x1.json").unlink()
    cells = grid(log=log)
    cells[2] = Cell("x2", square, {"log": log, "x": 20})
    again = run_cells(cells, tmp_path, workers=1)
    assert [outcome.reused for outcome in again] == [True, False, False, True]
    assert Path(log).read_text().split() == ["0", "1", "2", "3", "1", "20"]
    assert again[2].result["square"] == 400


def test_fingerprints_follow_function_and_arguments_only():
    cell = Cell("a", square, {"x": 1, "log": None})
    assert cell.fingerprint == Cell("b", square, {"log": None, "x": 1}, cost=3).fingerprint
    assert cell.fingerprint != Cell("a", square, {"x": 2, "log": None}).fingerprint
    assert cell.fingerprint != Cell("a", fail, {"x": 1, "log": None}).fingerprint


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_cell_is_reported_kept_and_tried_again(tmp_path, workers):
    cells = [*grid(count=2), Cell("bad", fail, {"x": -1}), Cell("nan", not_json, {"x": 0})]
    outcomes = run_cells(cells, tmp_path, workers=workers)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False, False]
    assert "ArithmeticError: no root of -1" in failures(outcomes)
    assert failures(outcomes).startswith("2 of 4 cells failed: bad (")
    assert "no root of -1" in (tmp_path / "cells" / "bad.error.txt").read_text()
    repaired = run_cells([*cells[:2], Cell("bad", square, {"x": -1})], tmp_path, workers=workers)
    assert repaired[2].result["square"] == 1
    assert not (tmp_path / "cells" / "bad.error.txt").exists()


def test_a_worker_that_dies_takes_no_other_cell_along(tmp_path):
    cells = [Cell("dies", die, {"x": 0}, cost=9), *grid()]
    outcomes = run_cells(cells, tmp_path, workers=2)
    assert "died" in outcomes[0].error
    assert [outcome.result["square"] for outcome in outcomes[1:]] == [0, 1, 4, 9]


def test_dearer_cells_start_first(tmp_path):
    log = str(tmp_path / "log")
    cells = [Cell(f"x{x}", square, {"x": x, "log": log}, cost=x) for x in range(3)]
    run_cells(cells, tmp_path, workers=1)
    assert Path(log).read_text().split() == ["2", "1", "0"]


def test_a_folder_outlives_an_interruption_and_not_a_change_of_arguments(tmp_path):
    def run(x):
        return run_cells([Cell("own", append_to_own_folder, {"x": x}, folder=True)], tmp_path, workers=1)[0]

    assert run(1).error is not None
    assert run(1).result == ["1", "1"]
    assert run(2).error is not None
    assert run(2).result == ["2", "2"]
    stranger = tmp_path / "cells" / "own"
    (stranger / "cell.json").unlink()
    assert "holds files that no cell made" in run(3).error


def test_the_time_of_tries_that_failed_counts(tmp_path):
    cell = Cell("own", fail_slowly_at_first, {"x": 1}, folder=True)
    failed, again, stored = (run_cells([cell], tmp_path, workers=1)[0] for _ in range(3))
    assert failed.error is not None
    assert again.result == 1
    assert stored.reused
    assert stored.seconds == again.seconds >= failed.seconds >= 0.1
    assert not (tmp_path / "cells" / "own.lost").exists()


def test_workers_get_their_threads(tmp_path):
    cells = [Cell("a", torch_threads), Cell("b", torch_threads)]
    assert [outcome.result for outcome in run_cells(cells, tmp_path, workers=2, threads=3)] == [3, 3]


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from foreword.cells import run_cells
import test_cells
if __name__ == "__main__":
    run_cells(test_cells.slow_grid(), sys.argv[1], workers=2)
"""


def slow(x):
    time.sleep(0.2)
    return x / 3


def slow_grid():
    return [Cell(f"x{x}", slow, {"x": x}) for x in range(12)]


def test_a_killed_run_goes_on_and_ends_with_the_table_of_an_uninterrupted_one(tmp_path):
    script = tmp_path / "grid.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    killed = tmp_path / "killed"
    run = subprocess.Popen([sys.executable, str(script), str(killed)])
    while len(list(killed.glob("cells/*.json"))) < 3:
        assert run.poll() is None, "the run ended before it was killed"
        time.sleep(0.02)
    run.kill()
    run.wait()
    assert len(list(killed.glob("cells/*.json"))) < 12
    continued = run_cells(slow_grid(), killed, workers=1)
    assert sum(outcome.reused for outcome in continued) >= 3
    whole = tmp_path / "whole"
    run_cells(slow_grid(), whole, workers=1)

    def table(folder):
        return {path.name: json.loads(path.read_text())["result"] for path in folder.glob("cells/*.json")}

    assert table(killed) == table(whole)
    assert len(table(killed)) == 12


def test_two_runs_do_not_share_a_folder(tmp_path):
    from filelock import FileLock

    (tmp_path / "cells").mkdir()
    with FileLock(tmp_path / "cells" / ".lock"), pytest.raises(ForewordError, match="another run is working on"):
        run_cells(grid(), tmp_path, workers=1)


@pytest.mark.parametrize(
    ("cells", "options", "message"),
    [
        ([Cell("a/b", square, {"x": 1})], {}, "can't be a file name"),
        ([Cell("a", square, {"x": 1})] * 2, {}, "two cells are named"),
        ([Cell("a", square, {"x": {1}})], {}, "not JSON values"),
        ([Cell("a", lambda: 1)], {}, "top level"),
        ([], {"backend": "threads"}, "unknown backend"),
        ([], {"workers": 0}, "give 1 or more"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, cells, options, message):
    with pytest.raises(ForewordError, match=message) as told:
        run_cells(cells, tmp_path, **options)
    assert "\n" not in str(told.value)


def test_ray_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ForewordError, match="pip install"):
        run_cells(grid(), tmp_path, backend="ray")


def test_ray_computes_the_same_results(tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False, runtime_env=environment)
    try:
        outcomes = run_cells([*grid(), Cell("bad", fail, {"x": 4})], tmp_path, backend="ray")
    finally:
        ray.shutdown()
    assert [outcome.result["square"] for outcome in outcomes[:4]] == [0, 1, 4, 9]
    assert "no root of 4" in outcomes[4].error


def test_the_bar_counts_what_is_missing_and_what_comes_later(tmp_path, monkeypatch):
    bars = []

    class Recorded(cells.Progress):
        def add_task(self, *arguments, **fields):
            bars.append(fields)
            return super().add_task(*arguments, **fields)

    monkeypatch.setattr(cells, "Progress", Recorded)
    run_cells(grid(count=2), tmp_path, workers=1)
    later = [Cell(f"later{x}", square, {"x": x}, cost=10) for x in range(3)]
    run_cells(grid(count=4), tmp_path, workers=1, later=later)
    assert [(bar["cells"], bar["total"]) for bar in bars] == [(2, 2), (5, 32)]
