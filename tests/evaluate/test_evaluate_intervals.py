"""Intervals against published values, against textbook formulas, and by how often they are right."""

import numpy as np
import pytest
from scipy import stats

from foreword.evaluate.intervals import crossed_mean, holm, mean, paired, proportion, ratio

# standard deviations of (seeds, items, what is left)
MIXES = {"seeds": (1, 0.01, 0.01), "items": (0, 1, 0.01), "rest": (0, 0, 1), "all": (0.05, 0.3, 0.3)}


def draw_table(generator, mix, seeds, items):
    of_seeds, of_items, rest = MIXES[mix]
    table = of_seeds * generator.normal(size=(seeds, 1)) + of_items * generator.normal(size=(1, items))
    return table + rest * generator.normal(size=(seeds, items))


def test_wilson_at_eight_of_ten():
    value, low, high = proportion([1.0] * 8 + [0.0] * 2)
    assert (value, low, high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)  # Brown, Cai & DasGupta 2001's formula


def test_wilson_stays_within_bounds():
    assert proportion([0.0] * 5).low == 0
    assert proportion([1.0] * 5).high == 1
    assert proportion([0.0] * 5).high > 0.3


def test_the_mean_of_many_items_has_the_normal_interval():
    values = np.random.default_rng(0).normal(3, 2, 400)
    found = mean(values)
    assert found.value == pytest.approx(values.mean())
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.05)


def test_a_ratio_varies_as_the_delta_method_says():
    draw = np.random.default_rng(0)
    under = draw.normal(5, 1, 400)
    over = 2 * under + draw.normal(0, 1, 400)
    found = ratio(over, under)
    residual = over - found.value * under
    assert found.value == over.sum() / under.sum()
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * residual.std() / under.mean() / 20, rel=0.05)
    assert ratio(3 * under, under) == pytest.approx((3, 3, 3))


def test_one_seed_is_students_paired_test():
    draw = np.random.default_rng(0)
    one, other = draw.normal(0.3, 1, 30), draw.normal(0, 1, 30)
    expected = stats.ttest_rel(one, other)
    found = paired([one], [other])
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))


def test_seeds_that_differ_and_items_that_do_not_are_students_test_of_the_seeds():
    seeds = np.array([0.1, 0.4, 0.2])
    found = paired(np.repeat(seeds[:, None], 50, axis=1), np.zeros((3, 50)))
    assert found.p == pytest.approx(stats.ttest_1samp(seeds, 0).pvalue)


def test_items_that_differ_and_seeds_that_do_not_are_students_test_of_the_items():
    items = np.random.default_rng(0).normal(0.2, 1, 50)
    found = paired(np.tile(items, (3, 1)), np.zeros((3, 50)))
    assert found.p == pytest.approx(stats.ttest_1samp(items, 0).pvalue)


def test_what_two_methods_share_cancels():
    draw = np.random.default_rng(0)
    items = draw.normal(size=(1, 200)) * 10  # hard and easy items
    one = items + draw.normal(size=(5, 200))
    found = paired(one + 0.5, one)
    assert found.value == pytest.approx(0.5)
    assert found.half_width < 1e-9
    assert found.p == 2.0**-199
    assert paired(one, one).p == 1


def test_a_few_items_that_all_agree_are_no_proof():
    assert paired([[1.0] * 4], [[0.0] * 4]).p == 1 / 8


def test_scores_between_0_and_1_have_an_interval_there():
    found = crossed_mean([[1, 1, 1, 0], [1, 1, 1, 1]])
    assert found.low < found.value < found.high == 1
    assert crossed_mean([[1, 1, 1, 0], [1, 1, 1, 2]]).high > 1


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("mix", MIXES)
def test_a_difference_is_seldom_found_where_there_is_none(mix, seeds):
    """At a level of 5 %, and never far above: of 400 tables 5 % are 20, and 36 are more than chance makes of them."""
    draw = np.random.default_rng(0)
    tables = [draw_table(draw, mix, seeds, items=60) for _ in range(400)]
    assert sum(paired(table, np.zeros_like(table)).p < 0.05 for table in tables) < 36


@pytest.mark.parametrize("mix", MIXES)
def test_intervals_hold_the_truth_about_as_often_as_they_say(mix):
    draw = np.random.default_rng(1)
    found = [crossed_mean(draw_table(draw, mix, seeds=5, items=40)) for _ in range(400)]
    assert sum(one.low <= 0 <= one.high for one in found) > 364


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
