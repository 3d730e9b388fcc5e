"""How often two methods that are alike are told apart at a level of 5 %: by our test, and by a paired bootstrap.

    python -m benchmarks.intervals --output out/benchmarks

Differences between two methods are drawn with a mean of 0 for S seeds and N test examples: a part of each seed, one of
each example, and the rest. The bootstrap draws seeds and examples again together.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from foreword.evaluate.intervals import paired

from .measuring import Report

# standard deviations of (seeds, examples, the rest)
MIXES = {"seeds": (1.0, 0.01, 0.01), "examples": (0.0, 1.0, 0.01), "the rest": (0.0, 0.0, 1.0), "all": (0.05, 0.3, 0.3)}
RESAMPLES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 5, 10], help="numbers of seeds S")
    parser.add_argument("--examples", type=int, default=100, help="test examples N")
    parser.add_argument("--tables", type=int, default=1000, help="drawn for each number")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    draw = np.random.default_rng(0)
    rows = []
    for mix, (of_seeds, of_examples, rest) in MIXES.items():
        for seeds in options.seeds:
            found = {"t": 0, "bootstrap": 0}
            for _ in range(options.tables):
                table = of_seeds * draw.normal(size=(seeds, 1)) + of_examples * draw.normal(size=(1, options.examples))
                table = table + rest * draw.normal(size=table.shape)
                found["t"] += paired(table, np.zeros_like(table)).p < 0.05
                found["bootstrap"] += _bootstrap_p(table, draw) < 0.05
            rows.append([mix, seeds, *(100 * count / options.tables for count in found.values())])
    report = Report({"examples": options.examples, "tables": options.tables, "resamples": RESAMPLES})
    report.table("told apart, %", ["they differ by", "seeds", "Foreword", "bootstrap"], rows)
    report.save(options.output, "intervals")


def _bootstrap_p(table: np.ndarray, draw: np.random.Generator) -> float:
    """Twice the smaller tail beyond 0 of the means (Efron & Tibshirani 1993, ch. 15)."""
    seeds, examples = table.shape
    of_seeds = draw.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    of_examples = draw.multinomial(examples, np.full(examples, 1 / examples), RESAMPLES) / examples
    means = ((of_seeds @ table) * of_examples).sum(1)
    return 2 * (1 + min((means <= 0).sum(), (means >= 0).sum())) / (RESAMPLES + 1)


if __name__ == "__main__":
    main()
