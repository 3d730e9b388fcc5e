"""Statements: their words and their numbers."""

import numpy as np
import pytest

from foreword.compare.statements import statements


def table(mean: float, seeds: int, items: int = 200) -> dict[int, list[float]]:
    draw = np.random.default_rng(round(1000 * mean))
    return {seed: (draw.random(items) < mean).astype(float).tolist() for seed in range(seeds)}


def test_the_better_one_stands_first_with_points_p_and_seeds():
    (found,) = statements({"trec": {"b": table(0.3, 5), "a": table(0.8, 5)}}, {"trec": "accuracy"})
    assert (found.first, found.second) == ("a", "b")
    assert found.low < found.difference < found.high
    assert found.difference == pytest.approx(0.5, abs=0.05)
    half = 50 * (found.high - found.low)
    assert found.sentence == (
        f"a beats b on trec by {100 * found.difference:.1f} ± {half:.1f} points (p = {found.p:.2g}, 5 seeds)"
    )


def test_what_is_not_sure_is_not_said():
    one = table(0.5, 3)
    other = {seed: [1 - item for item in items] for seed, items in one.items()}
    (found,) = statements({"trec": {"a": one, "b": other}}, {"trec": "accuracy"})
    assert found.p > 0.05
    assert "can't be told apart on trec" in found.sentence


def test_common_seeds_and_the_frozen_model():
    scores = {"trec": {"a": table(0.8, 5), "b": {seed: items for seed, items in table(0.7, 5).items() if seed > 1}}}
    scores["trec"]["frozen"] = {-1: table(0.2, 1)[0]}
    found = {(one.first, one.second): one.seeds for one in statements(scores, {"trec": "accuracy"})}
    assert found == {("a", "b"): 3, ("a", "frozen"): 5, ("b", "frozen"): 3}


def test_a_small_p_among_many_pairs_says_so():
    draw = np.random.default_rng(0)
    runs = {f"m{number}": {seed: draw.random(50).tolist() for seed in range(3)} for number in range(12)}
    found = [one for one in statements({"trec": runs}, {"trec": "accuracy"}) if one.p < 0.05]
    assert found
    for one in found:
        assert one.sentence.endswith(f"3 seeds; {one.p_holm:.2g} when adjusted for all pairs)")


def test_p_is_adjusted_for_every_pair():
    scores = {"trec": {"a": table(0.5, 3), "b": table(0.56, 3), "c": table(0.9, 3)}}
    for one in statements(scores, {"trec": "accuracy"}):
        assert one.p <= one.p_holm <= 3 * one.p
