"""From the lists that cells return to the rows of a result."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..cells import Outcome, failures

Pool = dict[str, list[Any]]
HUGE = 1e300


def pool(outcomes: Sequence[Outcome], *names: str) -> dict[tuple[Any, ...], Pool]:
    """The lists of all cells whose arguments `names` are equal, joined, by those arguments' values.

    A group whose cells all failed is there, and empty.
    """
    groups: dict[tuple[Any, ...], Pool] = {}
    for outcome in outcomes:
        group = groups.setdefault(tuple(outcome.cell.arguments[name] for name in names), {})
        for name, values in (outcome.result or {}).items():
            group.setdefault(name, []).extend(values)
    return groups


def counts(found: Pool, replicates: int) -> dict[str, int]:
    """How many replicates converged, failed to, are degenerate (where that is told) and are lost with their cell."""
    fitted, converged = len(found["converged"]), sum(found["converged"])
    row = {"replicates": replicates, "converged": converged, "failed": fitted - converged}
    if "degenerate" in found:
        row["degenerate"] = sum(found["degenerate"])
    return row | {"lost": replicates - fitted}


def median(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    """Median and quartiles of all values, as `name` and `name`_quartiles; None counts as infinite and comes back."""
    finite = np.minimum(numbers(values), HUGE)  # NumPy's interpolation makes NaN of infinity
    low, middle, high = (float(q) if q < 1e-3 * HUGE else None for q in np.quantile(finite, [0.25, 0.5, 0.75]))
    return {name: middle, f"{name}_quartiles": [low, high]}


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """`values` as an array, None as inf."""
    return np.array([math.inf if value is None else value for value in values], dtype=float)


def summary(experiment: str, arguments: Mapping[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What every result begins with: what was asked, how long the cells took together, and which failed."""
    return {
        "experiment": experiment,
        "arguments": dict(arguments),
        "seconds_of_cells": round(sum(outcome.seconds for outcome in outcomes), 1),
        "failed_cells": failures(outcomes),
    }
