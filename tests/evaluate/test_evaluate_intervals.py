"""Intervals against published values, against the theory of their variance, and by how often they are right."""

import math

import numpy as np
import pytest

from foreword.evaluate.intervals import crossed_mean, holm, paired, proportion, ratio, resampled_means


def test_wilson_at_eight_of_ten():
    value, low, high = proportion([1.0] * 8 + [0.0] * 2)
    assert (value, low, high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)  # Brown, Cai & DasGupta 2001's formula


def test_wilson_stays_within_bounds():
    assert proportion([0.0] * 5).low == 0
    assert proportion([1.0] * 5).high == 1
    assert proportion([0.0] * 5).high > 0.3


def test_the_variance_between_few_seeds_is_not_underestimated():
    table = np.repeat([[0.0], [1.0], [2.0]], 50, axis=1)  # three seeds that differ, items that don't
    assert resampled_means(table, seed=0).std() == pytest.approx(math.sqrt(1 / 3), rel=0.02)


def test_the_variance_between_items_is_theirs():
    table = np.tile(np.arange(100.0), (3, 1))
    assert resampled_means(table, seed=0).std() == pytest.approx(table[0].std() / 10, rel=0.02)
    assert crossed_mean(table).value == 49.5


def test_a_ratio_varies_as_the_delta_method_says():
    draw = np.random.default_rng(0)
    under = draw.normal(5, 1, 400)
    over = 2 * under + draw.normal(0, 1, 400)
    found = ratio(over, under)
    residual = over - found.value * under
    assert found.value == over.sum() / under.sum()
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * residual.std() / under.mean() / 20, rel=0.05)
    assert ratio(3 * under, under) == pytest.approx((3, 3, 3))


def test_what_two_methods_share_cancels():
    draw = np.random.default_rng(0)
    items = draw.normal(size=(1, 200)) * 10  # hard and easy items
    one = items + draw.normal(size=(5, 200))
    found = paired(one + 0.5, one)
    assert found.value == pytest.approx(0.5)
    assert found.half_width < 1e-9
    assert found.p == pytest.approx(2 / 10_001)
    assert paired(one, one).p == 1


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    draw = np.random.default_rng(1)
    held = 0
    for trial in range(100):
        seeds, items = draw.normal(size=(5, 1)), draw.normal(size=(1, 40))
        table = seeds + 2 * items + draw.normal(size=(5, 40))
        found = crossed_mean(table, seed=trial)
        held += found.low <= 0 <= found.high
    assert 84 <= held <= 99  # 95 less what five seeds' normal quantiles lose


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
