"""Each method's learning rate, by a small sweep on the demo task.

    python -m benchmarks.learning_rates

Trains every method of the registry at its defaults on the restaurant listings (SmolLM2-135M, 400 examples, batch 8)
at its own rate, a third of it and three times it, and scores held-out listings. Resumable.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import foreword as fw
from foreword.base import text_base
from foreword.cells import Cell, failures, run_cells
from foreword.data.builtin import restaurants, score
from foreword.demo import fast_dtype
from foreword.files import read_json, write_json, write_text
from foreword.generation import Sampling, answer
from foreword.space import from_dict
from foreword.train import Training, train

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


def run(method: str, learning_rate: float, steps: int, tests: int, folder: Path) -> dict[str, Any]:
    """Train one method at one rate; the scores of the adapted model on held-out listings."""
    model, tokenizer = text_base("smollm2", dtype=fast_dtype())
    held_out = restaurants("test", tests)
    settings = Training(
        output_dir=str(folder / "adapter"),
        learning_rate=learning_rate,
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=steps,
        per_device_eval_batch_size=tests,
        save_strategy="no",
        group_by_length=True,
    )
    result = train(model, tokenizer, from_dict({"method": method}), restaurants(), settings, eval_data=held_out)
    answers = answer(model, tokenizer, list(held_out["prompt"]), Sampling(max_new_tokens=64, batch_size=tests))
    return {
        "loss": [line["loss"] for line in result.history if "loss" in line][-1],
        "eval_loss": [line["eval_loss"] for line in result.history if "eval_loss" in line][-1],
        "trainable": result.adapter.num_trainable,
        "seconds": round(result.seconds, 1),
        **score(answers, held_out),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: a row for each method, its held-out loss at each rate, the lowest in bold."""
    rates = sorted({row["learning_rate"] for row in rows})
    head = ["method", "trained", "steps", *(f"{rate:g}" for rate in rates), "facts right"]
    lines = [" | ".join(["", *head, ""]).strip(), "|---|" + "--:|" * (len(head) - 1)]
    for method in dict.fromkeys(row["method"] for row in rows):
        losses = {row["learning_rate"]: row for row in rows if row["method"] == method}
        best = min(losses.values(), key=lambda row: row["eval_loss"])
        cells = [f"{losses[rate]['eval_loss']:.3f}" if rate in losses else "" for rate in rates]
        cells[rates.index(best["learning_rate"])] = f"**{best['eval_loss']:.3f}**"
        cells = [method, f"{best['trainable']:,}", str(best["steps"]), *cells, f"{best['slot_accuracy']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default="out/learning_rates", help="folder of the cells, results.json and table.md")
    parser.add_argument(
        "--methods", nargs="*", default=list(fw.methods()), metavar="NAME[:RATE,…]", help="rates: three around its own"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tests", type=int, default=25, help="held-out listings")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    cells = [
        Cell(
            f"{method}-{rate:g}",
            run,
            {"method": method, "learning_rate": rate, "steps": options.steps, "tests": options.tests},
            folder=True,
        )
        for method, rates in map(asked, options.methods)
        for rate in rates
    ]
    outcomes = run_cells(cells, options.output, workers=options.workers, description="training")
    results = Path(options.output) / "results.json"
    known = read_json(results) if results.exists() else []  # of earlier calls, for other methods and rates
    new = [{**one.cell.arguments, **one.result} for one in outcomes if one.error is None]
    rows = list({(row["method"], row["learning_rate"]): row for row in known + new}.values())
    write_json(results, rows)
    print(write_text(Path(options.output) / "table.md", table(rows)).read_text())
    if (problems := failures(outcomes)) is not None:
        print(problems)


def asked(text: str) -> tuple[str, list[float]]:
    """ "NAME" or "NAME:RATE,RATE" → the method and its rates."""
    method, _, rates = text.partition(":")
    return method, [float(rate) for rate in rates.split(",")] if rates else around(fw.methods()[method].learning_rate)


def around(rate: float) -> list[float]:
    """The grid's nearest rate, with its neighbours."""
    nearest = min(range(len(RATES)), key=lambda index: abs(RATES[index] / rate - 1))
    return list(RATES[max(0, nearest - 1) : nearest + 2])


if __name__ == "__main__":
    main()
