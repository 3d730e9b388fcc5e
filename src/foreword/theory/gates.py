"""The gate: how well it is estimated, what it takes from the prompts near zero, and what it shares with free values.

Three experiments on the separate softmax, f = words + tanh(alpha) branch:

* strength: errors of gate and prompts over n when tanh(alpha*) is large, small or zero. At zero the prompts leave f
  unchanged, so no data says anything about them; just above, it takes an n beyond a multiple of tanh(alpha*)^-2.
* confounding: the smallest noise-free risk when the gate is held at a wrong value. Free values take over any factor, so
  the risk is zero for every gate but zero; shared prompts can't, because their scale also moves the keys.
* opening: how often a least-squares search that knows nothing reaches the optimum from a closed gate and from an open
  one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..cells import Backend, Cell, Outcome, run_cells
from ..errors import ForewordError
from ..files import write_json
from . import plots
from .data import at_random, near_truth, noise_free, sample, seeds_of
from .fit import fit
from .losses import matched_distance
from .model import DTYPE, Model, Problem
from .page import write_page
from .slopes import log_log_slope, sample_sizes
from .surfaces import HeldGate
from .tables import counts, median, pool, summary

TOLERANCE = 1e-3  # of a fit, in units of chi-squared
REACHED = 6.0  # excess chi-squared up to which a search counts as having found the optimum
BLOCK = 8  # replicates in one cell
OPENING = {"n": 3200, "replicates": 8, "starts": 10}  # of the searches from random prompts
FAR = 10.0  # a fitted prompt beyond this size ran away


def strength(
    setting: str, gate: float, n: int, first: int, count: int, starts: int, seed: int, problem: int
) -> dict[str, list[Any]]:
    """Errors of gate and prompts where tanh(alpha*) is `gate`, one list entry a replicate.

    Each fit has `starts` starting points near the truth and as many that know nothing, with the gate a little open.
    """
    head = Problem.draw(problem, gate=gate)
    seeds = [seeds_of(seed, n, replicate) for replicate in range(first, first + count)]
    model = Model(setting, head, len(head.bias))
    data = sample(setting, head, n, [data for data, _ in seeds])
    at = [start for _, start in seeds]
    points = torch.cat([near_truth(model, at, starts), at_random(model, at, starts, gate=0.1)], 1)
    found = fit(model, data, points, tolerance=TOLERANCE)
    truth = model.truth()
    _, atoms = model.measure(found.theta)
    raw = found.theta[:, 1:].unflatten(-1, (model.length, model.width))[..., 1:]
    return {
        "gate": (model.gate(found.theta) - gate).abs().tolist(),
        "prompts": matched_distance(atoms, model.measure(truth)[1]).tolist(),
        "converged": found.converged.tolist(),
        "degenerate": (raw.abs().amax((-2, -1)) > FAR).tolist(),
    }


def confounding(
    setting: str, gates: Sequence[float], starts: int, points: int, seed: int, problem: int
) -> dict[str, list[Any]]:
    """min E |f(x) - f*(x)|^2 over the prompts with tanh(alpha) held at each of `gates`."""
    head = Problem.draw(problem)
    model = Model(setting, head, len(head.bias))
    population = noise_free(setting, head, points)
    risks, converged = [], []
    for gate in gates:
        alpha = torch.full((starts,), gate, dtype=DTYPE).atanh()
        begin = near_truth(model, [seed], starts)[..., 1:]
        found = fit(model, population, begin, HeldGate(model, alpha), tolerance=1e-6)
        risks.append(float(found.rss[0]) / points)
        converged.append(bool(found.converged[0]))
    return {"risk": risks, "converged": converged}


def opening(
    setting: str, surplus: int, gate: float, n: int, replicates: int, starts: int, seed: int, problem: int
) -> dict[str, int]:
    """How many of `starts` searches on each data set, from random prompts and tanh(alpha) = `gate`, reach the optimum.

    The optimum is the best fit known: of all these searches and of four from near the truth.
    """
    head = Problem.draw(problem)
    seeds = [seeds_of(seed, n, replicate) for replicate in range(replicates)]
    model = Model(setting, head, len(head.bias) + surplus)
    data = sample(setting, head, n, [data for data, _ in seeds])
    at = [start for _, start in seeds]
    known = fit(model, data, near_truth(model, at, 4), tolerance=TOLERANCE)
    found = fit(model, data, at_random(model, at, starts, gate), tolerance=TOLERANCE)
    best = torch.minimum(known.rss, found.rss)
    reached = (found.start_rss - best.unsqueeze(-1)) / head.noise**2 < REACHED
    converged = found.start_converged
    return {
        "searches": replicates * starts,
        "reached": int(reached.sum()),
        "elsewhere": int((converged & ~reached).sum()),
        "failed": int((~converged & ~reached).sum()),
    }


def gates(
    settings: Sequence[str] = ("zero-linear", "zero-nonlinear", "zero-free"),
    strengths: Sequence[float] = (0.7, 0.2, 0.05, 0.0),
    n: str | Sequence[int] = "200..10000",
    replicates: int = 16,
    starts: int = 2,
    held: Sequence[float] = (0.1, 0.3, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9),
    points: int = 4096,
    seed: int = 0,
    problem: int = 0,
    output: str | Path = "out/theory/gates",
    workers: int | None = None,
    backend: Backend = "processes",
    plot: bool = True,
) -> dict[str, Any]:
    """Run the three gate experiments; write `gates.json`, `report.html` and plots into `output`.

    * `settings`: names of `model.SETTINGS` with a separate softmax.
    * `strengths`: true gates tanh(alpha*), in [0, 1), of the shared settings.
    * `n`, `replicates`: sample sizes (a list or a range such as "200..10000") and data sets for each.
    * `starts`: starting points of a fit near the truth, and as many that know nothing.
    * `held`: gates, in (0, 1), at which the confounding is measured (the true one is 0.7), on `points` Sobol points.
    * `seed`, `problem`, `output`, `workers`, `backend`, `plot`: as in `rates.rates`.

    The searches of the third experiment run on the shared settings and, for comparison, on random-init; see `OPENING`.

    The result has `strength` (a row for each setting, gate and n: median errors; converged, failed, degenerate and lost
    replicates), `slopes` of those errors with 95 % bootstrap intervals, `confounding` and `opening`.
    Raises `ForewordError` for a setting without a gate and for numbers out of range.
    """
    sizes = sample_sizes(n)
    for name in settings:
        if not Model(name, Problem.draw(problem)).gated:
            raise ForewordError(f"{name} has no gate: choose zero-linear, zero-nonlinear or zero-free")
    if not all(0 <= gate < 1 for gate in strengths) or not all(0 < gate < 1 for gate in held):
        raise ForewordError("strengths are gates tanh(alpha*) in [0, 1), held gates are in (0, 1)")
    if min(replicates, starts, points) < 1:
        raise ForewordError("replicates, starts and points must be 1 or more")
    if plot:
        plots.require()
    shared = [name for name in settings if Model(name, Problem.draw(problem)).setting.prompt == "shared"]
    common = {"seed": seed, "problem": problem}
    cells = []
    for setting in shared:
        for gate in strengths:
            for size in sizes:
                for first in range(0, replicates, BLOCK):
                    where = {"setting": setting, "gate": gate, "n": size, "first": first}
                    where |= {"count": min(BLOCK, replicates - first), "starts": starts}
                    name = f"strength-{setting}-t{gate:g}-n{size}-r{first}"
                    cells.append(Cell(name, strength, where | common, cost=size * where["count"] * starts * 2))
    for setting in settings:
        where = {"setting": setting, "gates": list(held), "starts": starts, "points": points}
        cells.append(Cell(f"confounding-{setting}", confounding, where | common, cost=points * len(held) * starts))
    for setting in ("random-init", *shared):
        for surplus in (0, 1):
            for gate in (0.0, 0.5) if setting != "random-init" else (0.0,):
                where = {"setting": setting, "surplus": surplus, "gate": gate, **OPENING}
                name = f"opening-{setting}-plus{surplus}-t{gate:g}"
                cost = 2 * OPENING["n"] * OPENING["replicates"] * OPENING["starts"]
                cells.append(Cell(name, opening, where | common, cost=cost))
    outcomes = run_cells(cells, output, workers=workers, threads=1, backend=backend, description="theory gates")

    def of(function: Any) -> list[Outcome]:
        return [outcome for outcome in outcomes if outcome.cell.function is function]

    found = pool(of(strength), "setting", "gate", "n")
    asked = {"settings": list(settings), "strengths": list(strengths), "n": sizes, "held": list(held)}
    asked |= {"replicates": replicates, "starts": starts, "points": points}
    result = summary("gates", asked | common, outcomes)
    result["strength"] = [
        {"setting": setting, "gate_strength": gate, "n": n, **counts(errors, replicates)}
        | median("gate", errors["gate"])
        | median("prompts", errors["prompts"])
        for (setting, gate, n), errors in found.items()
        if errors
    ]
    result["slopes"] = []
    for setting in shared:
        for gate in strengths:
            kept = [n for n in sizes if found[setting, gate, n]]
            for error in ("gate", "prompts"):
                slope = log_log_slope(kept, [found[setting, gate, n][error] for n in kept], seed=seed)
                row = {"setting": setting, "gate_strength": gate, "error": error}
                result["slopes"].append(row | slope)
    result["confounding"] = [_with(outcome, "setting", "gates") for outcome in of(confounding) if outcome.result]
    result["opening"] = [_with(outcome, "setting", "surplus", "gate") for outcome in of(opening) if outcome.result]
    write_json(Path(output) / "gates.json", result)
    write_page(result, Path(output))
    if plot:
        plots.draw_gates(result, Path(output))
    return result


def _with(outcome: Outcome, *names: str) -> dict[str, Any]:
    return {name: outcome.cell.arguments[name] for name in names} | outcome.result
