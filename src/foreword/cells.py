"""Grids of independent computations: resumable, parallel, and one failure at a time.

A grid is a list of cells. A cell is a name, a function and its arguments; what the function returns is kept as JSON:

    from foreword.cells import Cell, run_cells

    cells = [Cell(f"n{n}-seed{seed}", measure, {"n": n, "seed": seed}) for n in (100, 1000) for seed in range(5)]
    outcomes = run_cells(cells, "out/grid")

writes `out/grid/cells/n100-seed0.json` and its neighbours, each whole or absent. Running the same grid again computes
the cells whose result is missing or belongs to other arguments, and nothing else; so a killed run goes on where it
stopped and ends with the files of an uninterrupted one. A change of the function's code is not noticed: use another
folder for it.
"""

import hashlib
import json
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .errors import ForewordError
from .files import read_json, write_json, write_text
from .workers import in_processes, in_this_process, on_ray

Backend = Literal["processes", "ray"]


@dataclass(frozen=True)
class Cell:
    """One computation of a grid.

    * `name`: its file name, unique in the grid: letters, digits, ".", "_", "=", "+" and "-".
    * `function`: importable by its module and name, because another process calls it. It returns a JSON value.
    * `arguments`: its keyword arguments, JSON values.
    * `folder`: whether it gets one more keyword argument `folder`, a directory of its own that outlives an interrupted
      run (for checkpoints) and is emptied when the arguments change.
    * `cost`: how long it takes relative to the other cells. Dearer cells start first, and the time left is reckoned
      from it.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    folder: bool = False
    cost: float = 1.0

    @property
    def call(self) -> dict[str, Any]:
        """The function's name and the arguments, as they are stored beside the result."""
        function = f"{self.function.__module__}:{self.function.__qualname__}"
        return {"function": function, "arguments": dict(self.arguments)}

    @property
    def fingerprint(self) -> str:
        """A hash of `call`: equal for equal functions and arguments, whatever the order of the arguments."""
        text = json.dumps(self.call, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its `result`, or the `error` that its function raised (the traceback as text).

    `reused` tells that the result was there already. `seconds` is the time the function took when it ran, in tries
    that failed too; how long one took whose process died is not known.
    """

    cell: Cell
    result: Any = None
    error: str | None = None
    seconds: float = 0.0
    reused: bool = False


def run_cells(
    cells: Sequence[Cell],
    output: str | Path,
    *,
    workers: int | None = None,
    threads: int | None = None,
    backend: Backend = "processes",
    resources: Mapping[str, float] | None = None,
    description: str = "cells",
    later: Sequence[Cell] = (),
) -> list[Outcome]:
    """Compute the cells whose result is not in `output` yet and return every cell's outcome, in the order of `cells`.

    * `workers`: processes that compute at the same time, by default one for each CPU. With one the cells run in this
      process.
    * `threads`: PyTorch threads of a worker, by default the CPUs shared out evenly.
    * `backend`: "processes" on this machine, or "ray" on the cluster that `ray.init()` finds. There `workers` is the
      number of cells in flight, by default all, and cells that have folders need an `output` that the nodes share.
    * `resources`: what a cell asks of Ray, for example {"num_cpus": 1, "num_gpus": 1}; by default a CPU a thread.
    * `description`: the name of the progress bar.
    * `later`: cells that the caller will run after these; the bar counts them, so that its time is that of the whole.

    A cell that raises, or whose process dies, becomes an `Outcome` with an `error`, its traceback is kept beside
    where its result would be (NAME.error.txt, and the time it took in NAME.lost), and the other cells go on; it is
    tried again by the next run. Progress over the whole grid is shown on stderr where that is a terminal.

    Raises `ForewordError` for names that clash or can't be file names, a function that can't be imported by another
    process, arguments that are not JSON, a grid that another run is working on, or a backend that is not installed.
    """
    if backend not in ("processes", "ray"):
        raise ForewordError(f"unknown backend {backend!r}: processes or ray")
    if workers is not None and workers < 1:
        raise ForewordError(f"workers is {workers}: give 1 or more")
    _check(cells)
    folder = Path(output) / "cells"
    with _lock(folder):
        stored = {cell.name: outcome for cell in cells if (outcome := _stored(cell, folder))}
        missing = sorted((cell for cell in cells if cell.name not in stored), key=lambda cell: -cell.cost)
        computed = {}
        with _progress(description, [*missing, *later]) as advance:
            for cell, result in _outcomes(missing, folder.absolute(), workers, threads, backend, resources):
                outcome = result if isinstance(result, Outcome) else Outcome(cell, error=result)
                outcome = replace(outcome, seconds=round(outcome.seconds + _lost(cell, folder), 3))
                _keep(outcome, folder)
                computed[cell.name] = outcome
                advance(outcome)
    return [stored.get(cell.name) or computed[cell.name] for cell in cells]


def _outcomes(
    cells: Sequence[Cell],
    folder: Path,
    workers: int | None,
    threads: int | None,
    backend: Backend,
    resources: Mapping[str, float] | None,
) -> Iterator[tuple[Cell, Outcome | str]]:
    """Every cell as it is done, with its outcome or with what became of the process that computed it."""
    if not cells:
        return iter(())
    compute = partial(_compute, folder=folder)
    if backend == "ray":
        return on_ray(compute, cells, workers or len(cells), threads or 1, resources)
    cpus = os.cpu_count() or 1
    if (workers or cpus) == 1:
        return in_this_process(compute, cells, threads)
    parallel = min(workers or cpus, len(cells))
    modules = sorted({cell.function.__module__ for cell in cells})
    return in_processes(compute, cells, parallel, threads or max(1, cpus // parallel), modules)


def stored(cells: Sequence[Cell], output: str | Path) -> list[Outcome]:
    """The outcomes of the cells whose result is in `output`, without computing any."""
    _check(cells)
    return [outcome for cell in cells if (outcome := _stored(cell, Path(output) / "cells"))]


def failures(outcomes: Sequence[Outcome]) -> str | None:
    """One line that names the failed cells and their errors' last lines, or None where every cell has a result."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return None
    lines = [f"{outcome.cell.name} ({outcome.error.strip().splitlines()[-1]})" for outcome in failed if outcome.error]
    return f"{len(failed)} of {len(outcomes)} cells failed: {'; '.join(lines)}"


def _check(cells: Sequence[Cell]) -> None:
    seen = set()
    for cell in cells:
        if not re.fullmatch(r"[\w=+-][\w.=+-]*", cell.name):
            raise ForewordError(f"cell name {cell.name!r} can't be a file name: use letters, digits and . _ = + -")
        if cell.name in seen:
            raise ForewordError(f"two cells are named {cell.name!r}: give each its own name")
        seen.add(cell.name)
        try:
            cell.fingerprint  # noqa: B018
        except (TypeError, ValueError) as error:
            raise ForewordError(f"cell {cell.name}: the arguments are not JSON values: {error}") from error
        if "<" in cell.function.__qualname__:
            raise ForewordError(
                f"cell {cell.name}: {cell.function.__qualname__} must be a function of a module's top level"
            )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ForewordError(
            f"another run is working on {folder.parent}: wait for it or choose another folder"
        ) from error


def _stored(cell: Cell, folder: Path) -> Outcome | None:
    path = folder / f"{cell.name}.json"
    if not path.exists():
        return None
    record = read_json(path)
    if not isinstance(record, dict) or record.get("fingerprint") != cell.fingerprint:
        return None
    return Outcome(cell, record["result"], seconds=record["seconds"], reused=True)


def _lost(cell: Cell, folder: Path) -> float:
    """Seconds of the tries at a cell, with these arguments, that failed."""
    path = folder / f"{cell.name}.lost"
    record = read_json(path) if path.exists() else {}
    return record["seconds"] if record.get("fingerprint") == cell.fingerprint else 0.0


def _keep(outcome: Outcome, folder: Path) -> None:
    cell = outcome.cell
    error, lost = folder / f"{cell.name}.error.txt", folder / f"{cell.name}.lost"
    if outcome.error is not None:
        write_text(error, outcome.error)
        write_json(lost, {"fingerprint": cell.fingerprint, "seconds": outcome.seconds})
        return
    record = {
        "fingerprint": cell.fingerprint,
        **cell.call,
        "seconds": outcome.seconds,
        "result": outcome.result,
    }
    write_json(folder / f"{cell.name}.json", record)
    error.unlink(missing_ok=True)
    lost.unlink(missing_ok=True)


def _own_folder(cell: Cell, folder: Path) -> Path:
    """The cell's directory, empty unless the same cell, with the same arguments, left something in it."""
    own, mark = folder / cell.name, folder / cell.name / "cell.json"
    if own.exists() and not mark.exists() and any(own.iterdir()):
        raise ForewordError(f"{own} holds files that no cell made: move them away")
    if mark.exists() and read_json(mark).get("fingerprint") != cell.fingerprint:
        shutil.rmtree(own)
    if not mark.exists():
        write_json(mark, {"fingerprint": cell.fingerprint, **cell.call})
    return own


def _compute(cell: Cell, folder: Path) -> Outcome:
    """Call the cell's function, wherever this runs; an exception becomes the outcome's error."""
    begun = time.perf_counter()
    try:
        own = {"folder": _own_folder(cell, folder)} if cell.folder else {}
        result = json.loads(json.dumps(cell.function(**cell.arguments, **own), allow_nan=False))
    except Exception:
        return Outcome(cell, error=traceback.format_exc(), seconds=time.perf_counter() - begun)
    return Outcome(cell, result, seconds=time.perf_counter() - begun)


@contextmanager
def _progress(description: str, cells: Sequence[Cell]) -> Iterator[Callable[[Outcome], None]]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[finished]}/{task.fields[cells]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=24 * 3600)
    finished = 0
    with shown:
        bar = shown.add_task(description, total=sum(cell.cost for cell in cells), finished=0, cells=len(cells))

        def advance(outcome: Outcome) -> None:
            nonlocal finished
            finished += 1
            shown.update(bar, advance=outcome.cell.cost, finished=finished)
            if outcome.error is not None:
                shown.console.print(f"[red]failed[/red] {outcome.cell.name}")

        yield advance
