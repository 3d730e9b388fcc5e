"""foreword compare"""

from __future__ import annotations

from typing import Literal


def run(
    study: str,
    output: str | None = None,
    data: str | None = None,
    model: str | None = None,
    train: str = "",
    test: str = "",
    workers: int | None = None,
    threads: int | None = None,
    backend: Literal["processes", "ray"] = "processes",
    gpus: float = 0,
    collect: bool = False,
    json: bool = False,
) -> int:
    """Compare methods at equal budgets over tasks, shares of the data and seeds, with intervals and a report.

    Examples:
        foreword compare study.yaml --output out/study
        foreword compare zero-init --model ./base --train tickets.jsonl --test held_out.jsonl --workers 4

    A study that is killed goes on with the missing runs when it is started again; `tensorboard --logdir OUTPUT` shows
    the runs as they go. docs/comparison.md says what a study file holds.

    Args:
        study: a YAML file, or a ready study: zero-init, unified-view, sample-efficiency, init or parscale.
        output: folder of the runs, results.json, cells.json and report.html; out/compare/<study> by default.
        data: folder that the study's data files are relative to; the study's own folder by default.
        model: a base in place of the study's.
        train: a data file in place of the study's tasks, with `test`.
        test: the file to test with.
        workers: runs at a time; by default one where there is an accelerator, else one for each CPU.
        threads: PyTorch threads of a run.
        backend: "processes" on this machine, or "ray" on a cluster.
        gpus: what each run asks of Ray; 0.5 puts two on one.
        collect: run nothing; make the report of the runs that are there.
        json: print the result as JSON.
    """
    from pathlib import Path

    from ..compare import compare, read_study
    from ..errors import ForewordError
    from .output import console, show_json, show_table

    if gpus and backend != "ray":
        raise ForewordError("--gpus is what each run asks of Ray: add --backend ray, or set CUDA_VISIBLE_DEVICES")
    chosen = read_study(study, data=data, model=model, train=train, test=test)
    folder = output or str(Path("out/compare") / chosen.name)
    resources = {"num_gpus": gpus} if gpus else None
    result = compare(
        chosen, folder, workers=workers, threads=threads, backend=backend, resources=resources, collect=collect
    )
    if json:
        show_json(result)
    else:
        rows = [
            {
                "test": row["test"],
                "data": f"{100 * row['fraction']:g} %",
                "length": row["length"],
                "method": row["method"],
                "score": "{:.3f} [{:.3f}, {:.3f}]".format(*row["score"]),
                "seeds": row["seeds"],
                "trained": row["trainable"],
                "training s": row["train_seconds"],
            }
            for row in result["table"]
        ]
        if rows:
            show_table(rows)
        for statement in result["statements"]:
            console.print(statement["sentence"], highlight=False, markup=False)
        console.print(f"{result['cost']['hours']:.2f} machine-hours. Report: {folder}/report.html", highlight=False)
    if result["failed"]:
        console.print(str(result["failed"]), highlight=False, markup=False)
        return 1
    return 0
