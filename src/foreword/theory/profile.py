"""Can the data tell two prompts from one? The profile risk of a split prompt, and how wide a split stays hidden.

Slopes of a fit that started near the truth cannot show that a parameter is not identifiable: the fit stays near. Here
one prompt of the truth is replaced by two halves of equal weight a distance Delta apart, everything else is free, and

    R(Delta) = min E |f(x) - f*(x)|^2        (no noise, no sampling)

says what the best such function costs. R ~ Delta^4 means that n rows of data resolve Delta ~ n^{-1/4}; R = 0 means
that no amount of data resolves it. With noise, the profile-likelihood interval of Delta says the same of a data set:
its upper end is the width of the set of parameters that the data cannot tell apart.
"""

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
from .data import Data, noise_free, sample, seeds_of
from .fit import fit
from .model import DTYPE, SETTINGS, Model, Problem
from .page import write_page
from .slopes import log_log_slope, sample_sizes
from .surfaces import SplitPrompt
from .tables import Pool, counts, median, pool, summary

ZERO = 1e-20  # a risk below it is zero in float64
CHI2_95 = 3.841  # of one degree of freedom
TOLERANCE = 1e-3  # of a fit, in units of chi-squared
DELTAS = tuple(0.05 * 2 ** (step / 2) for step in range(9))  # 0.05 .. 0.8, half the way between the true prompts
BLOCK = 8  # replicates in one cell
CASES = {  # (setting, what is split): the exponent of R in Delta that the analysis gives, None where R = 0
    ("random-init", "prompt"): 4.0,
    ("random-init-nonlinear", "prompt"): 4.0,
    ("zero-linear", "prompt"): 4.0,
    ("zero-nonlinear", "prompt"): 4.0,
    ("random-init-free", "key"): 4.0,
    ("zero-free", "key"): 4.0,
    ("random-init-free", "value"): None,
    ("zero-free", "value"): None,
}


def coordinates(model: Model, split: str) -> range:
    """The coordinates of an atom that a split "prompt", "key" or "value" moves; `ForewordError` for a mismatch."""
    key_width = len(model.problem.B)
    parts = {"prompt": range(model.width - 1)}
    if model.setting.prompt == "free":
        parts = {"key": range(key_width), "value": range(key_width, model.width - 1)}
    if split not in parts:
        raise ForewordError(f"{model.name} has no {split!r} to split: {' or '.join(parts)}")
    return parts[split]


def split_fits(
    setting: str, split: str, head: Problem, data: Data, deltas: Sequence[float], directions: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The smallest |r|^2 of R data sets with a split of each Delta, (R, deltas), and which of the fits converged.

    The fits of the first Delta start from the truth with `directions` random directions of the split; those of the
    next one from the fit of the last, once as it is and otherwise with new directions.
    """
    model = Model(setting, head, len(head.bias) + 1)
    spanned = coordinates(model, split)
    datasets = len(data.y)
    g = torch.Generator().manual_seed(seed)
    start = model.true().truth().expand(datasets, directions, -1)
    w = torch.randn(datasets, directions, len(spanned), generator=g, dtype=DTYPE)
    rss, converged = [], []
    for delta in deltas:
        surface = SplitPrompt(model, torch.full((datasets * directions,), delta, dtype=DTYPE), spanned)
        found = fit(model, data, torch.cat([start, w], -1), surface, tolerance=TOLERANCE)
        rss.append(found.rss)
        converged.append(found.converged)
        start, direction = found.theta.split([model.true().parameters, len(spanned)], -1)
        start = start.unsqueeze(1).expand(-1, directions, -1)
        w = torch.randn(datasets, directions, len(spanned), generator=g, dtype=DTYPE)
        w[:, 0] = direction
    return torch.stack(rss, -1), torch.stack(converged, -1)


def risk(
    setting: str, split: str, deltas: Sequence[float], directions: int, points: int, seed: int, problem: int
) -> dict[str, Any]:
    """R(Delta) for each Delta, as the mean over `points` Sobol points."""
    head = Problem.draw(problem)
    population = noise_free(setting, head, points)
    rss, converged = split_fits(setting, split, head, population, deltas, directions, seed)
    return {"risk": (rss[0] / points).tolist(), "converged": converged[0].tolist()}


def width(
    setting: str,
    split: str,
    n: int,
    first: int,
    count: int,
    deltas: Sequence[float],
    directions: int,
    seed: int,
    problem: int,
) -> dict[str, Any]:
    """The width of replicates `first` .. `first + count` at sample size `n`; None where it is beyond `deltas`.

    The excess of Delta is its smallest |r|^2 / noise^2 above the smallest of all Delta, zero included. The width is
    where the excess first passes 3.84 (95 %, one degree of freedom) above the best Delta, interpolated between
    `deltas`.
    """
    head = Problem.draw(problem)
    data = sample(setting, head, n, [seeds_of(seed, n, replicate)[0] for replicate in range(first, first + count)])
    rss, converged = split_fits(setting, split, head, data, deltas, directions, seed + first)
    exact = Model(setting, head, len(head.bias))
    whole = fit(exact, data, exact.truth().expand(count, 1, -1), tolerance=TOLERANCE)
    best = torch.minimum(rss.amin(-1), whole.rss)
    excess = (rss - best.unsqueeze(-1)) / head.noise**2
    widths = [crossing(deltas, row) for row in excess.tolist()]
    return {"width": widths, "converged": (converged.all(-1) & whole.converged).tolist()}


def crossing(deltas: Sequence[float], excess: Sequence[float]) -> float | None:
    """The Delta where the excess first passes 3.84 after its smallest value; None if it never does.

    Between two of `deltas` the root of the excess is taken to grow like Delta^2.
    """
    lowest = min(range(len(excess)), key=excess.__getitem__)
    for index in range(lowest, len(excess)):
        if excess[index] > CHI2_95:
            if index == 0:
                return deltas[0]
            low, high = math.sqrt(excess[index - 1]), math.sqrt(excess[index])
            near, far = deltas[index - 1] ** 2, deltas[index] ** 2
            return math.sqrt(near + (far - near) * (math.sqrt(CHI2_95) - low) / (high - low))
    return None


def profile(
    settings: Sequence[str] = tuple(SETTINGS),
    deltas: Sequence[float] = DELTAS,
    n: str | Sequence[int] = (800, 3200, 12800, 51200),
    replicates: int = 8,
    directions: int = 2,
    points: int = 4096,
    seed: int = 0,
    problem: int = 0,
    output: str | Path = "out/theory/profile",
    workers: int | None = None,
    backend: Backend = "processes",
    plot: bool = True,
) -> dict[str, Any]:
    """Measure the profile risk and the width of the indistinguishable set; write `profile.json`, a page and plots.

    * `settings`: names of `model.SETTINGS`; shared ones split a prompt, free ones a key and, apart, a value.
    * `deltas`: distances of the halves, in the units of a prompt. From 0.8 on, half the way between the true prompts, a
      half could be taken for the other prompt.
    * `n`, `replicates`: sample sizes (a list or a range) and data sets for each, for the width.
    * `directions`: random starting directions of a split; the direction is optimised.
    * `points`: Sobol points that stand for the distribution of x.
    * `seed`, `problem`, `output`, `workers`, `backend`, `plot`: as in `rates.rates`.

    The result has `risk`, a row for each (setting, split) with R at each Delta and the exponent of Delta between the
    two smallest (None where R is zero); `width`, a row for each (setting, split, n) with the median width, its
    quartiles, how many replicates are `open` (no Delta tried is excluded; a median or quartile that falls on one is
    None) and how many had a fit that did not converge; `slopes` of the median width over the n without open ones; and
    `expected`, the width without sampling, where n R(Delta) / noise^2 = 3.84. Raises `ForewordError` for an unknown
    setting or numbers out of range.
    """
    sizes = sample_sizes(n)
    deltas = sorted(deltas)
    if len(deltas) < 2 or deltas[0] <= 0 or min(replicates, directions, points) < 1:
        raise ForewordError(
            "deltas must be two or more positive distances, replicates, directions and points 1 or more"
        )
    for name in settings:
        Model(name, Problem.draw(problem))
    if plot:
        plots.require()
    cases = [case for case in CASES if case[0] in settings]
    common = {"directions": directions, "seed": seed, "problem": problem}
    cells = []
    for setting, split in cases:
        where = {"setting": setting, "split": split, "deltas": deltas, **common}
        cost = points * len(deltas)
        cells.append(Cell(f"risk-{setting}-{split}", risk, where | {"points": points}, cost=cost))
        for size in sizes:
            for first in range(0, replicates, BLOCK):
                block = {"n": size, "first": first, "count": min(BLOCK, replicates - first)}
                name = f"width-{setting}-{split}-n{size}-r{first}"
                cells.append(Cell(name, width, where | block, cost=size * block["count"] * len(deltas)))
    outcomes = run_cells(cells, output, workers=workers, threads=1, backend=backend, description="theory profile")
    risks = pool([outcome for outcome in outcomes if outcome.cell.function is risk], "setting", "split")
    widths = pool([outcome for outcome in outcomes if outcome.cell.function is width], "setting", "split", "n")
    asked = {"settings": list(settings), "deltas": deltas, "n": sizes, "replicates": replicates, "points": points}
    result = summary("profile", asked | common, outcomes)
    result["risk"] = [_risk_row(case, deltas, risks[case]) for case in cases if risks[case]]
    result["width"] = [
        {"setting": setting, "split": split, "n": n, **counts(found, replicates)}
        | {"open": found["width"].count(None)}
        | median("width", found["width"])
        for (setting, split, n), found in widths.items()
        if found
    ]
    result["slopes"] = [_width_slope(case, {n: widths[(*case, n)] for n in sizes}, seed) for case in cases]
    noise = Problem.draw(problem).noise
    result["expected"] = [
        {"setting": row["setting"], "split": row["split"], "n": n}
        | {"width": crossing(deltas, [n * value / noise**2 for value in row["risk"]])}
        for row in result["risk"]
        for n in sample_sizes("1000..1000000")
    ]
    write_json(Path(output) / "profile.json", result)
    write_page(result, Path(output))
    if plot:
        plots.draw_profile(result, Path(output))
    return result


def _risk_row(case: tuple[str, str], deltas: Sequence[float], found: Pool) -> dict[str, Any]:
    (near, far), (low, high) = deltas[:2], found["risk"][:2]
    exponent = math.log(high / low) / math.log(far / near) if low > ZERO else None
    row = {"setting": case[0], "split": case[1], "deltas": list(deltas), "risk": found["risk"]}
    return row | {"failed": found["converged"].count(False), "exponent": exponent, "theory": CASES[case]}


def _width_slope(case: tuple[str, str], found: dict[int, Pool], seed: int) -> dict[str, Any]:
    closed = [n for n, pool in found.items() if pool and None not in pool["width"]]
    slope = log_log_slope(closed, [found[n]["width"] for n in closed], seed=seed)
    theory = None if CASES[case] is None else -0.25
    return {"setting": case[0], "split": case[1], "n": closed, **slope, "theory": theory}
