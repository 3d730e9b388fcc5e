"""Equal budgets: the size that a number of parameters allows, and the steps that a number of seconds allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from ..count import fit_budget
from ..errors import ForewordError
from ..files import read_json, write_json
from .entries import Entry

PROBE = 5  # steps that are timed


def sized(entry: Entry, model: PreTrainedModel, parameters: int) -> Entry:
    """The entry at the largest size of at most `parameters` trainable parameters on `model`.

    An entry with `fit: false` and the frozen model stay as they are.

    Raises:
        ForewordError: the method is larger at its smallest size, or the entry is a composition, which has no one size.
    """
    if not entry.fit or not entry.methods:
        return entry
    exempt = "set `fit: false` to compare it at its own size"
    if len(entry.methods) > 1:
        raise ForewordError(f"methods: {entry.name}: a composition has no one size to fit a budget; {exempt}")
    try:
        return replace(entry, methods=(fit_budget(entry.methods[0], model, parameters),))
    except ForewordError as error:
        raise ForewordError(f"methods: {entry.name}: {error}; {exempt}") from error


def steps_within(seconds: float, time_steps: Callable[[int], float], folder: Path) -> int:
    """How many steps fit into `seconds`, by the pace of a few that are timed and thrown away.

    Args:
        time_steps: trains so many steps on a throw-away adapter and returns the seconds.
        folder: where the answer is kept, so that a run that is killed and goes on has the same.
    """
    path = folder / "steps.json"
    if not path.exists():
        time_steps(1)  # the first step makes caches
        pace = time_steps(PROBE) / PROBE
        write_json(path, {"steps": max(1, int(seconds / pace)), "seconds_per_step": pace})
    return int(read_json(path)["steps"])
