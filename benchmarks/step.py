"""Training steps: time and peak memory of every arm, as ratios to the frozen base.

    python -m benchmarks.step --output out/benchmarks

A step is forward and backward of the loss. Arms are interleaved in one process. Memory is measured after all times,
with an allocator that gives freed memory back at once. Slopes are what 100 more tokens cost: least squares over the
lengths l, and the difference between the shortest and the longest text for T.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path

import torch

from foreword.base import base

from . import arms as comparison
from .measuring import Report, interleave, keep_memory, peak_memory, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 30, 128, 512], help="prefix lengths l")
    parser.add_argument("--peer-lengths", type=int, nargs="+", default=[30, 512], help="those of the peers' prefixes")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="tokens T of each row")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=8, help="rounds at the shortest T; fewer at longer ones")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", help="arms whose name has this in it, beside the floor")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()

    report = Report({"rows": options.rows, "clock": options.clock, "repetitions": options.repetitions})
    for dtype in options.dtypes:
        time_steps(dtype, report, options)
        report.save(options.output, "step")
    for dtype in options.dtypes if options.memory else ():
        measure_memory(dtype, report, options)
        report.save(options.output, "step")


def time_steps(dtype: str, report: Report, options: argparse.Namespace) -> None:
    arms = make(dtype, options)
    medians: dict[int, dict[str, float]] = {}  # tokens → arm → seconds
    for tokens in options.tokens:
        ids = draw(options.rows, tokens)
        steps = {name: functools.partial(arm.step, ids) for name, arm in arms.items()}
        rounds = max(3, options.repetitions * min(options.tokens) // tokens)
        seconds = interleave(steps, rounds, options.clock)
        floor = seconds[comparison.FLOOR]
        medians[tokens] = {name: statistics.median(s) for name, s in seconds.items()}
        report.table(
            f"Training step, {options.rows}×{tokens} tokens, {dtype}: ratio to the frozen base",
            ["arm", "seconds", "time ratio (quartiles)"],
            [[name, medians[tokens][name], ratio(s, floor)] for name, s in seconds.items()],
        )
    report.table(f"Slopes, {dtype}", ["arm", "per cent of the base for 100 more", ""], slopes(medians, options.lengths))


def measure_memory(dtype: str, report: Report, options: argparse.Namespace) -> None:
    arms = make(dtype, options)
    peaks: dict[str, list[float]] = {name: [] for name in arms}
    for tokens in options.tokens:
        ids = draw(options.rows, tokens)
        for name, arm in arms.items():
            step = functools.partial(arm.step, ids)
            step()
            peaks[name].append(peak_memory(step))
    floors = peaks[comparison.FLOOR]
    report.table(
        f"Peak memory of a step over that of the frozen base, {dtype}, MB",
        ["arm", *(f"{options.rows}×{tokens} tokens" for tokens in options.tokens)],
        [[name, *(peak - floor for peak, floor in zip(own, floors, strict=True))] for name, own in peaks.items()],
    )


def slopes(medians: dict[int, dict[str, float]], lengths: list[int]) -> list[list[object]]:
    """What 100 more tokens of prefix or text cost each arm, in per cent of the base's step."""
    rows: list[list[object]] = []
    first, last = min(medians), max(medians)
    for tokens, seconds in medians.items():
        floor = seconds[comparison.FLOOR]
        for arm in dict.fromkeys(name.partition(" l=")[0] for name in seconds if " l=" in name):
            costs = {length: seconds[f"{arm} l={length}"] for length in lengths if f"{arm} l={length}" in seconds}
            if len(costs) > 1:
                slope = statistics.linear_regression(list(costs), list(costs.values())).slope
                rows.append([arm, 1e4 * slope / floor, f"of l, T = {tokens}"])
    if last > first:
        for name, cost in medians[first].items():
            slope = (medians[last][name] - cost) / (last - first)
            rows.append([name, 1e4 * slope / medians[first][comparison.FLOOR], "of T"])
    return rows


def make(dtype: str, options: argparse.Namespace) -> dict[str, comparison.Arm]:
    arms = comparison.make(base("smollm2", dtype=getattr(torch, dtype))[0], options.lengths, options.peer_lengths)
    return {name: arm for name, arm in arms.items() if name == comparison.FLOOR or (options.only or "") in name}


def draw(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 49152, (rows, tokens), generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    main()
