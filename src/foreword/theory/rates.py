"""How fast the least-squares estimate approaches the truth: errors over n, beside the exponents of the theory."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cells import Backend, Cell, run_cells
from ..errors import ForewordError
from ..files import write_json
from . import plots
from .data import Data, near_truth, noise_free, sample, seeds_of
from .fit import Fit, fit
from .losses import matched_distance, voronoi
from .model import SETTINGS, Model, Problem
from .page import write_page
from .slopes import log_log_slope, sample_sizes
from .surfaces import HeldGate
from .tables import Pool, counts, median, pool, summary

TOLERANCE = 1e-3  # of a fit, in units of chi-squared
TAIL = 1000  # slopes are also taken over n >= TAIL
FAR, LIGHT = 10.0, 1e-6  # a fitted prompt beyond this size, or of less than this share of the weight, is degenerate

# The exponent of n that the analysis gives each error; "doubled" is the distance of prompts that share a true one.
THEORY = {"f": -0.5, "gate": -0.5, "matched": -0.5, "single": -0.5, "doubled": -0.25, "D": -0.5}


def measure(
    setting: str,
    n: int,
    surplus: int,
    first: int,
    count: int,
    starts: int,
    start_scale: float,
    pilot: int,
    max_iterations: int,
    seed: int,
    problem: int,
) -> dict[str, list[float | bool | None]]:
    """Fit replicates `first` .. `first + count` at sample size `n` and return every error, one list entry a replicate.

    Every start is fitted to the first `pilot` rows, and the best of them goes on with all n.

    `f`: the L2 distance of fitted and true function. `gate`: |tanh(alpha) - tanh(alpha*)|. `matched`, `single`,
    `doubled` (as a distance: the root of the loss's part), `weights` and `D`: see `losses`. None stands for an error
    that a fit does not have.
    """
    head = Problem.draw(problem)
    seeds = [seeds_of(seed, n, replicate) for replicate in range(first, first + count)]
    model = Model(setting, head, len(head.bias) + surplus)
    data = sample(setting, head, n, [data for data, _ in seeds])
    points = near_truth(model, [start for _, start in seeds], starts, start_scale)
    true = model.true()
    truth = true.truth()
    held = None
    if setting == "zero-free":  # the scale of free values absorbs the gate: it is given, or nothing could be estimated
        held = HeldGate(model, truth[0].expand(count * starts))
        points = points[..., 1:]

    def search(rows: Data, points: Tensor) -> Fit:
        return fit(model, rows, points, held, max_iterations=max_iterations, tolerance=TOLERANCE)

    tried = search(data.head(pilot), points)
    found = tried if n <= pilot else search(data, tried.theta.unsqueeze(1))
    theta = found.theta if held is None else held(found.theta, torch.arange(count))[0]

    population = noise_free(setting, head)
    gap = model.value(theta, population.inputs) - population.y  # (R, q, points)
    weights, atoms = model.measure(theta)
    true_weights, true_atoms = true.measure(truth)
    loss = voronoi(weights, atoms, true_weights, true_atoms)
    gate = (model.gate(theta) - true.gate(truth)).abs()
    alpha = (theta[:, 0] - truth[0]).abs() if model.gated else torch.zeros(count)
    raw = theta[:, model.gated :].unflatten(-1, (model.length, model.width))[..., 1:]
    share = weights / weights.sum(-1, keepdim=True)
    degenerate = (loss.empty > 0) | (raw.abs().amax((-2, -1)) > FAR) | (share.amin(-1) < LIGHT)
    at_best = tried.start_rss - tried.rss.unsqueeze(-1) < 0.01 * head.noise**2
    excess = (found.rss - (true.value(truth, data.inputs) - data.y).square().sum((-2, -1))) / head.noise**2
    errors = {
        "f": gap.square().sum(-2).mean(-1).sqrt(),
        "gate": gate,
        "matched": matched_distance(atoms, true_atoms),
        "weights": loss.weights,
        "single": torch.where(loss.empty > 0, torch.inf, loss.single),
        "doubled": torch.where(loss.empty > 0, torch.inf, loss.doubled.sqrt()),
        "D": loss.total + alpha,
    }
    if not model.gated or held is not None:
        del errors["gate"]
    for name in ("single", "doubled") if surplus == 0 else ("matched",):
        del errors[name]
    return {name: [_finite(value) for value in values.tolist()] for name, values in errors.items()} | {
        "excess_chi2": excess.tolist(),
        "converged": found.converged.tolist(),
        "degenerate": degenerate.tolist(),
        "starts_converged": tried.start_converged.sum(-1).tolist(),
        "starts_at_best": at_best.sum(-1).tolist(),
        "iterations": found.iterations.amax(-1).tolist(),
    }


def rates(
    settings: Sequence[str] = ("random-init", "zero-linear", "zero-nonlinear"),
    n: str | Sequence[int] = "100..100000",
    over_specified: Sequence[int] = (0, 1),
    replicates: int = 32,
    starts: int = 4,
    start_scale: float = 0.3,
    pilot: int = 5000,
    max_iterations: int = 200,
    block: int = 8,
    seed: int = 0,
    problem: int = 0,
    output: str | Path = "out/theory/rates",
    workers: int | None = None,
    backend: Backend = "processes",
    plot: bool = True,
) -> dict[str, Any]:
    """Measure the estimation rates of each setting and write `rates.json`, `report.html` and plots into `output`.

    * `settings`: names of `model.SETTINGS`.
    * `n`: sample sizes, or a range such as "100..100000" (1, 2 and 5 of each decade).
    * `over_specified`: how many prompts are fitted beyond the true ones, each value an experiment.
    * `replicates`: data sets for each n.
    * `starts`: starting points of a fit, the truth plus normal noise of standard deviation `start_scale`.
    * `pilot`: where n is larger, all starts are fitted to the first `pilot` rows, and the best goes on with all n.
    * `max_iterations`: steps of a fit.
    * `block`: replicates in one resumable cell.
    * `seed`: of data and starts. `problem`: the seed that draws the frozen head.
    * `output`: a folder. `workers` and `backend`: see `cells.run_cells`.
    * `plot`: draw `rates.svg` and `rates.png` (needs the extra "report").

    The result has `table`, a row for each (setting, surplus prompts, n): counts of replicates that are converged,
    failed (not converged), degenerate (a true prompt that no fitted one is nearest to, or a fitted one that ran away
    or lost its weight) and lost (their cell raised), and medians over all replicates but the lost, whether converged
    or not; and `slopes`, a row for each error, over all n and over n >= 1000, with 95 % bootstrap intervals and the
    exponent of the theory. A killed run continues where it stopped.

    Raises `ForewordError` for an unknown setting and for numbers out of range.
    """
    sizes = sample_sizes(n)
    for name in settings:
        Model(name, Problem.draw(problem))
    if min(over_specified) < 0 or max(over_specified) > 4:
        raise ForewordError(f"over_specified is {list(over_specified)}: give numbers of surplus prompts from 0 to 4")
    if min(replicates, starts, block, pilot, max_iterations) < 1:
        raise ForewordError("replicates, starts, block, pilot and max_iterations must be 1 or more")
    if plot:
        plots.require()
    groups = [(setting, surplus, size) for setting in settings for surplus in over_specified for size in sizes]
    common = {"starts": starts, "start_scale": start_scale, "pilot": pilot, "max_iterations": max_iterations}
    common |= {"seed": seed, "problem": problem}
    cells = []
    for setting, surplus, size in groups:
        for first in range(0, replicates, block):
            count = min(block, replicates - first)
            where = {"setting": setting, "n": size, "surplus": surplus, "first": first, "count": count}
            name = f"{setting}-plus{surplus}-n{size}-r{first}"
            cells.append(Cell(name, measure, where | common, cost=size * count * (1.0 + 12 * surplus)))
    outcomes = run_cells(cells, output, workers=workers, threads=1, backend=backend, description="theory rates")
    found = pool(outcomes, "setting", "surplus", "n")
    asked = {"settings": list(settings), "n": sizes, "over_specified": list(over_specified)}
    result = summary("rates", asked | {"replicates": replicates} | common, outcomes)
    result["table"] = [_row(group, found[group], replicates) for group in groups if found[group]]
    result["slopes"] = [
        row
        for setting in settings
        for surplus in over_specified
        for row in _slopes(setting, surplus, {n: found[setting, surplus, n] for n in sizes}, seed)
    ]
    write_json(Path(output) / "rates.json", result)
    write_page(result, Path(output))
    if plot:
        plots.draw_rates(result, Path(output))
    return result


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _row(group: tuple[str, int, int], found: Pool, replicates: int) -> dict[str, Any]:
    setting, surplus, n = group
    row = {"setting": setting, "surplus": surplus, "n": n, **counts(found, replicates)}
    row["starts_at_best"] = sum(found["starts_at_best"]) / len(found["starts_at_best"])
    for error in THEORY:
        if error in found:
            row |= median(error, found[error])
    return row


def _slopes(setting: str, surplus: int, found: dict[int, Pool], seed: int) -> list[dict[str, Any]]:
    rows = []
    for error, exponent in THEORY.items():
        errors = {n: pool[error] for n, pool in found.items() if error in pool}
        if not errors:
            continue
        lost = error in ("single", "doubled", "D") and surplus > 0 and SETTINGS[setting].prompt == "free"
        row = {"setting": setting, "surplus": surplus, "error": error, "theory": None if lost else exponent}
        for over, least in (("all", 0), ("tail", TAIL)):
            some = [n for n in errors if n >= least]
            row[over] = {"n": some, **log_log_slope(some, [errors[n] for n in some], seed=seed)}
        rows.append(row)
    return rows
