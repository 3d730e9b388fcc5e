"""Log-log regression, its intervals, and the sample sizes that a range stands for."""

import numpy as np
import pytest

from foreword.errors import ForewordError
from foreword.theory.slopes import log_log_slope, sample_sizes
from foreword.theory.tables import median


def test_a_power_law_has_its_exponent():
    n = [100, 1000, 10000]
    found = log_log_slope(n, [[3 * size**-0.25] * 5 for size in n])
    assert found["slope"] == pytest.approx(-0.25)
    assert found["low"] == pytest.approx(-0.25)
    assert found["high"] == pytest.approx(-0.25)


def test_the_interval_covers_the_exponent_about_as_often_as_it_says():
    g = np.random.default_rng(0)
    n = [100, 200, 400, 800, 1600, 3200]
    covered = 0
    for _ in range(100):
        errors = [size**-0.5 * np.abs(g.normal(size=30)) for size in n]
        found = log_log_slope(n, errors, draws=200)
        covered += found["low"] <= -0.5 <= found["high"]
    assert covered >= 85


def test_missing_errors_count_as_infinite_and_never_vanish():
    n = [100, 1000]
    held = log_log_slope(n, [[0.1, 0.1, 0.1, 0.1, None], [0.01] * 5])
    assert held["slope"] == pytest.approx(-1)
    lost = log_log_slope(n, [[0.1, None, None], [0.01] * 3])
    assert lost == {"slope": None, "low": None, "high": None}
    assert median("error", [0.1, 0.2, None]) == {"error": 0.2, "error_quartiles": [pytest.approx(0.15), None]}


def test_one_size_has_no_slope():
    assert log_log_slope([100], [[0.1, 0.2]])["slope"] is None


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("100..2000", [100, 200, 500, 1000, 2000]),
        ("150..700", [150, 200, 500, 700]),
        ([800, 200], [200, 800]),
    ],
)
def test_sample_sizes(given, sizes):
    assert sample_sizes(given) == sizes


@pytest.mark.parametrize("given", ["100", "200..100", "a..b", [], [5]])
def test_sample_sizes_that_are_none(given):
    with pytest.raises(ForewordError, match="n is"):
        sample_sizes(given)
