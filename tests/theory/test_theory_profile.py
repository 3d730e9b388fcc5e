"""Profile risk and width: what decides is whether key and value share one prompt."""

import math

import pytest

from foreword.errors import ForewordError
from foreword.theory.data import sample
from foreword.theory.model import Model, Problem
from foreword.theory.profile import CASES, ZERO, coordinates, crossing, profile, risk, split_fits


@pytest.mark.parametrize("problem", [0, 1])
@pytest.mark.parametrize(("setting", "split"), CASES)
def test_the_risk_is_fourth_order_where_prompts_are_shared_and_zero_where_values_are_free(setting, split, problem):
    deltas = [0.05, 0.1]
    found = risk(setting, split, deltas, directions=2, points=1024, seed=0, problem=problem)
    assert all(found["converged"])
    if CASES[setting, split] is None:
        assert max(found["risk"]) < ZERO
    else:
        low, high = found["risk"]
        assert low > ZERO
        assert math.log2(high / low) == pytest.approx(4, abs=0.1)


def test_the_profile_of_a_data_set_is_never_below_its_best_fit():
    head = Problem.draw(0)
    data = sample("random-init", head, 400, [1, 2])
    rss, _ = split_fits("random-init", "prompt", head, data, [0.1, 0.4, 0.8], directions=2, seed=0)
    exact = Model("random-init", head)
    truth = (exact.value(exact.truth(), data.inputs) - data.y).square().sum((-2, -1))
    assert (rss[:, 0] < truth).all()
    assert (rss[:, -1] > rss[:, 0]).all()


def test_crossing():
    deltas = [0.1, 0.2, 0.4]
    assert crossing(deltas, [delta**4 * 3.841 / 0.3**4 for delta in deltas]) == pytest.approx(0.3)
    assert crossing(deltas, [5.0, 0.0, 4.0]) == pytest.approx(0.4, rel=0.05)
    assert crossing(deltas, [0.0, 1.0, 2.0]) is None


def test_what_can_be_split():
    head = Problem.draw(0)
    assert list(coordinates(Model("zero-linear", head), "prompt")) == [0, 1]
    assert list(coordinates(Model("zero-free", head), "value")) == [3, 4]
    with pytest.raises(ForewordError, match="no 'prompt' to split: key or value"):
        coordinates(Model("zero-free", head), "prompt")


def test_the_width_of_a_shared_prompt_closes_and_that_of_a_free_value_does_not(tmp_path):
    result = profile(
        settings=("random-init", "random-init-free"),
        deltas=(0.1, 0.2, 0.4, 0.8),
        n=(4000,),
        replicates=3,
        points=512,
        output=tmp_path,
        workers=1,
        plot=False,
    )
    assert result["failed_cells"] is None
    widths = {(row["setting"], row["split"], row["n"]): row for row in result["width"]}
    assert widths["random-init", "prompt", 4000]["open"] == 0
    assert 0.1 < widths["random-init", "prompt", 4000]["width"] < 0.8
    assert widths["random-init-free", "value", 4000]["open"] == 3
    expected = {(row["setting"], row["split"], row["n"]): row["width"] for row in result["expected"]}
    assert expected["random-init", "prompt", 100_000] / expected["random-init", "prompt", 10_000] == pytest.approx(
        10**-0.25, rel=0.15
    )
    assert expected["random-init-free", "value", 1_000_000] is None
