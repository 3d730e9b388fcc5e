"""foreword theory"""

from __future__ import annotations

from typing import Any, Literal


def run(
    experiment: Literal["rates", "profile", "gates"],
    setting: str | None = None,
    n: str | None = None,
    replicates: int | None = None,
    starts: int | None = None,
    seed: int = 0,
    problem: int = 0,
    workers: int | None = None,
    backend: Literal["processes", "ray"] = "processes",
    plot: bool = True,
    output: str | None = None,
    json: bool = False,
) -> int:
    """Simulate the estimation theory of zero-initialised attention, with intervals: docs/theory.md says what to expect.

    rates: how fast the errors of fitted prompts and gates fall with the sample size.
    profile: the risk of splitting a prompt, without noise, and the width of the set that data can't tell apart.
    gates: how well a gate is estimated, by its strength, and what it is confounded with.

    Examples:
        foreword theory rates --setting random-init,zero-linear,zero-nonlinear --n 100..100000
        foreword theory profile
        foreword theory gates --workers 2 --output out/gates

    A run that is killed goes on with the missing cells when it is started again.

    Args:
        experiment: rates, profile or gates.
        setting: settings joined by commas; each experiment has its own default.
        n: sample sizes joined by commas, or a range such as 100..100000 (1, 2 and 5 of each decade).
        replicates: data sets for each sample size.
        starts: starting points of a fit (rates and gates).
        seed: of data and starts.
        problem: the seed that draws the frozen head.
        workers: processes; one for each CPU by default.
        backend: "processes" on this machine, or "ray" on a cluster.
        plot: draw the plots, which need `pip install 'foreword[report]'`.
        output: folder of the results; out/theory/<experiment> by default.
        json: print the whole result as JSON.
    """
    from ..errors import ForewordError
    from ..theory.gates import gates
    from ..theory.profile import profile
    from ..theory.rates import rates
    from .output import console, show_json, show_table

    if experiment == "profile" and starts is not None:
        raise ForewordError("theory profile has no starts; it optimises the direction of each split")
    given: dict[str, Any] = {
        "settings": None if setting is None else setting.split(","),
        "n": n if n is None or ".." in n else _sizes(n),
        "replicates": replicates,
        "starts": starts,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    folder = output or f"out/theory/{experiment}"
    measure: Any = {"rates": rates, "profile": profile, "gates": gates}[experiment]
    result = measure(**chosen, seed=seed, problem=problem, workers=workers, backend=backend, plot=plot, output=folder)
    if json:
        show_json(result)
    else:
        show_table(result["slopes"])
        console.print(f"{folder}: the results as JSON, and plots", highlight=False)
    if result.get("failed_cells"):
        console.print(str(result["failed_cells"]), highlight=False)
        return 1
    return 0


def _sizes(text: str) -> list[int]:
    from ..errors import ForewordError

    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ForewordError(f"--n {text}: give numbers joined by commas, or a range such as 100..100000") from None
