"""foreword scaling"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..scaling import Workload


def run(
    action: Literal["fit", "cost"],
    data: str | None = None,
    corpus: Literal["stack", "pile"] | None = None,
    resamples: int = 500,
    model: str = "smollm2",
    streams: list[int] | None = None,
    times: list[float] | None = None,
    batch: int = 1,
    prompt: int = 64,
    new: int = 64,
    length: int = 48,
    measure: bool = True,
    rounds: int = 3,
    report: str | None = None,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Fit the scaling law of parallel streams (fit), or compare what streams and parameters cost (cost).

    Examples:
        foreword scaling fit --report law.html
        foreword scaling fit --data runs.csv
        foreword scaling cost --model smollm2 --streams [1,2,4] --batch 1
        foreword scaling cost --model Qwen/Qwen2.5-3B --measure false

    `fit` reads rows of parameters, streams and loss from a CSV file; without one, the authors' published losses of both
    corpora. `cost` sets P streams beside a model with as many times the parameters as the law says P streams are worth,
    or as --times says; by the paper's accounting for an A100, and measured on this machine with random weights.

    Args:
        action: fit or cost.
        data: a CSV file with the columns parameters, streams and loss.
        corpus: "stack" or "pile", of the published losses; for `fit` both by default, for `cost` "stack".
        resamples: fits of resampled rows behind the intervals; 0 for none.
        model: a Hub id, a local folder, or "smollm2", of which the config is read.
        streams: P; [1, 2, 4, 8] by default.
        times: for each P above 1, the factor on the parameters of the model to compare with.
        batch: prompts of a batch.
        prompt: tokens of a prompt.
        new: tokens to generate.
        length: prefix tokens of a stream.
        measure: generate on this machine as well.
        rounds: measurements of each model, of which the median counts.
        report: an HTML file to write.
        seed: of the resampling.
        json: print JSON.
    """
    from ..scaling import Workload

    if action == "fit":
        _fit(data, corpus, resamples, report, seed, json)
    else:
        work = Workload(batch, prompt, new, length)
        sizes = sorted({1, *(streams or [2, 4, 8])})
        _cost(model, sizes, times, corpus or "stack", work, rounds if measure else 0, report, json)


def _fit(data: str | None, corpus: str | None, resamples: int, report: str | None, seed: int, json: bool) -> None:
    from rich.console import Console
    from rich.progress import track

    from ..scaling.rows import CORPORA, published, read_rows
    from ..scaling.summary import fit_report, fit_summary
    from .output import console, show_json, show_table

    if data is not None:
        corpora = {data: read_rows(data)}
    else:
        corpora = {CORPORA[name]: published(name) for name in ([corpus] if corpus else CORPORA)}
    stderr = Console(stderr=True)
    progress = track(corpora.items(), "Fitting", console=stderr, transient=True, disable=not stderr.is_terminal)
    summaries = {name: fit_summary(rows, resamples, seed) for name, rows in progress}
    if report is not None:
        fit_report(corpora, summaries).write(report)
    if json:
        show_json(summaries)
        return
    for name, summary in summaries.items():
        show_table(summary["constants"], f"{name}: {summary['rows']} models, R² {summary['R2']:.4f}")
        show_table([{"P": int(p), "worth × parameters": worth} for p, worth in summary["worth"].items()])
        if summary["held out"]:
            show_table(summary["held out"])
    if report is not None:
        console.print(f"Report: {report}", highlight=False)


def _cost(
    model: str,
    streams: list[int],
    times: list[float] | None,
    corpus: str,
    work: Workload,
    rounds: int,
    report: str | None,
    json: bool,
) -> None:
    from ..errors import ForewordError
    from ..scaling import Shape, fit, published
    from ..scaling.summary import WHEN, cost_report, cost_rows, measured_rows, prefill_rows
    from .output import console, show_json, show_table

    several = [size for size in streams if size > 1]
    if streams[0] < 1 or min(work.batch, work.prompt, work.new, work.length) < 1:
        raise ForewordError("streams, batch, prompt, new and length must be positive")
    if times is not None and len(times) != len(several):
        raise ForewordError(f"times needs a factor for each of P = {several}, not {len(times)}")
    law = fit(published(corpus)).law
    factors = dict(zip(several, times, strict=True)) if times else {size: law.multiplier(size) for size in several}
    config = _config(model)
    shape = Shape.of(config)
    tables = {
        "By the paper's accounting": cost_rows(shape, streams, factors, work),
        "No queries for prefix tokens": prefill_rows(shape, streams, work),
    }
    if rounds:
        tables["Measured on this machine"] = measured_rows(config, streams, factors, rounds, work)
    if report is not None:
        cost_report(model, tables).write(report)
    if json:
        show_json(tables)
        return
    for name, rows in tables.items():
        show_table(rows, name)
    console.print(WHEN, highlight=False)


def _config(model: str) -> Any:
    """The config of a model, without its weights."""
    from transformers import AutoConfig

    from .. import smollm2
    from ..errors import ForewordError

    try:
        return AutoConfig.from_pretrained(smollm2.folder() if model == "smollm2" else model)
    except (OSError, ValueError) as error:
        raise ForewordError(f"can't read the config of {model}: {str(error).strip().splitlines()[0]}") from error
