"""What a study lets one say about two methods, with how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from ..evaluate.intervals import holm, paired

LEVEL = 0.05
FROZEN = -1  # the seed of a method that has none: the frozen model
Items = Mapping[int, Sequence[float]]  # seed → the metric of every test example


@dataclass(frozen=True)
class Statement:
    """One method beside another on one test.

    Attributes:
        first, second: the methods, the better one first.
        test: where, with the fraction and the length where the study has several.
        metric: of which the difference is one; in points (hundredths) where it lies between 0 and 1.
        difference, low, high: first minus second with its 95 % interval, over seeds and items.
        p: two-sided; `p_holm` is adjusted for all pairs of the study.
        seeds, items: how many both methods have in common.
    """

    first: str
    second: str
    test: str
    metric: str
    difference: float
    low: float
    high: float
    p: float
    p_holm: float
    seeds: int
    items: int

    @property
    def sentence(self) -> str:
        """ "A beats B on trec by 2.1 ± 0.9 points (p = 0.03, 5 seeds)".

        Where so small a p is to be expected among as many pairs, the adjusted one stands behind it.
        """
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        size = f"{100 * self.difference:.1f} ± {50 * (self.high - self.low):.1f} points"
        evidence = f"p = {self.p:.2g}, {seeds}"
        if self.p >= LEVEL:
            return f"{self.first} and {self.second} can't be told apart on {self.test}: {size} ({evidence})"
        if self.p_holm >= LEVEL:
            evidence += f"; {self.p_holm:.2g} when adjusted for all pairs"
        return f"{self.first} beats {self.second} on {self.test} by {size} ({evidence})"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence}


def statements(scores: Mapping[str, Mapping[str, Items]], metrics: Mapping[str, str]) -> list[Statement]:
    """A statement for each pair of methods with common seeds on each test: scores[test][method][seed] = items.

    The items of the one seed `FROZEN` stand beside those of every seed.
    """
    drafts = []
    for test, methods in scores.items():
        for one, other in combinations(methods, 2):
            seeds = _common(methods[one], methods[other])
            if seeds:
                first, second = ([_of_seed(methods[name], seed) for seed in seeds] for name in (one, other))
                drafts.append((test, one, other, len(seeds), len(first[0]), paired(first, second)))
    adjusted = holm([draft[-1].p for draft in drafts])
    made = []
    for (test, one, other, count, items, found), p_holm in zip(drafts, adjusted, strict=True):
        value, low, high = found.value, found.low, found.high
        if value < 0:
            one, other, value, low, high = other, one, -value, -high, -low
        made.append(Statement(one, other, test, metrics[test], value, low, high, found.p, p_holm, count, items))
    return made


def _common(one: Items, other: Items) -> list[int]:
    if FROZEN in one or FROZEN in other:
        return sorted(other if FROZEN in one else one)
    return sorted(one.keys() & other.keys())


def _of_seed(items: Items, seed: int) -> Sequence[float]:
    return items[FROZEN] if FROZEN in items else items[seed]
