"""Axes and table columns: any values give round ticks that a reader can tell apart."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.report.cells import column, plain
from foreword.report.scales import LARGEST, Scale, compact, domain, drawable, spelled

floats = st.floats() | st.integers(-(10**6), 10**6).map(float) | st.floats(0, 1)


@settings(deadline=None)
@given(
    values=st.lists(floats, max_size=6),
    log=st.booleans(),
    zero=st.booleans(),
    pad=st.sampled_from([0.0, 0.05]),
    count=st.integers(3, 10),
)
def test_any_values_give_a_few_round_ticks_with_different_labels(values, log, zero, pad, count):
    low, high = domain(values, log, zero, pad)
    scale = Scale(low, high, 10.0, 510.0, log)
    ticks, labels = zip(*scale.ticks(count), strict=True)

    assert low < high
    assert all(low <= value <= high for value in values if drawable(value, log))
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert all(10 - 1e-3 <= scale(tick) <= 510 + 1e-3 for tick in ticks)
    assert list(ticks) == sorted(set(ticks))
    assert len(set(labels)) == len(labels)
    assert 2 <= len(ticks) <= 2 * count
    assert all(f"{tick:.12e}".split("e")[0].rstrip("0") in ("1.", "2.", "3.", "5.") for tick in ticks) or is_even(ticks)


def is_even(ticks: tuple[float, ...]) -> bool:
    """Whether `ticks` are consecutive multiples of 1, 2 or 5 times a power of ten."""
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    mantissa = step / 10 ** math.floor(math.log10(step * (1 + 1e-9)))
    return any(math.isclose(mantissa, round_one, rel_tol=1e-5) for round_one in (1, 2, 5)) and all(
        math.isclose(tick / step, round(tick / step), abs_tol=1e-4) for tick in ticks if abs(tick / step) < 1e6
    )


@pytest.mark.parametrize(
    ("values", "log", "labels"),
    [
        ([0, 1], False, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0, 0.5], False, ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]),
        ([-3, 7], False, ["−2", "0", "2", "4", "6"]),
        ([0, 0.3], False, ["0", "0.05", "0.10", "0.15", "0.20", "0.25", "0.30"]),
        ([12_000, 98_000], False, ["20k", "40k", "60k", "80k"]),
        (
            [1e6, 1e6 + 1],
            False,
            ["1,000,000.0", "1,000,000.2", "1,000,000.4", "1,000,000.6", "1,000,000.8", "1,000,001.0"],
        ),
        ([1e-6, 5e-5], False, ["1e-5", "2e-5", "3e-5", "4e-5", "5e-5"]),
        ([1, 100], True, ["1", "3", "10", "30", "100"]),
        ([1e3, 1e8], True, ["1k", "10k", "100k", "1M", "10M", "100M"]),
        ([2.1, 4.9], True, ["2.5", "3.0", "3.5", "4.0", "4.5"]),
    ],
)
def test_ticks_read_as_a_person_would_write_them(values, log, labels):
    assert [label for _, label in Scale(*domain(values, log), 0, 1, log).ticks(5)] == labels


def test_an_axis_leaves_out_what_it_cannot_show():
    assert domain([math.nan, math.inf, -math.inf, 2 * LARGEST, 3, 5]) == (3, 5)
    assert domain([0, -1, 3, 30], log=True) == (3, 30)
    assert domain([]) == (0, 1)
    assert domain([], log=True) == (1, 10)
    assert domain([7]) == pytest.approx((6.3, 7.7))


def test_an_axis_starts_at_zero_only_where_the_values_stand_near_it():
    assert domain([1, 10], zero=True) == (0, 10)
    assert domain([-10, -1], zero=True) == (-10, 0)
    assert domain([9, 10], zero=True) == (9, 10)


@pytest.mark.parametrize(
    ("value", "short", "long"),
    [
        (0, "0", "0"),
        (0.0321987, "0.0322", "0.0322"),
        (-12_345, "−12.35k", "−12,345"),
        (1.5e6, "1.5M", "1,500,000"),
        (2e-5, "2e-5", "2e-5"),
        (-1.23456e18, "−1.235e18", "−1.235e18"),
        (math.nan, "nan", "nan"),
    ],
)
def test_numbers_in_few_characters(value, short, long):
    assert (compact(value), spelled(value)) == (short, long)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.9123456, 0.85, 0.7], ["0.9123", "0.8500", "0.7000"]),
        ([82.13333, 79.9], ["82.13", "79.90"]),
        ([0.5, 0.25, None], ["0.50", "0.25", "–"]),
        ([3, 12_345, -2], ["3", "12,345", "−2"]),
        ([1234.5678, 3], ["1,235", "3"]),
        ([3e-5, 0.01, 2.0], ["3e-5", "0.01", "2"]),
        ([math.nan, math.inf, 1.5], ["–", "–", "1.5"]),
        ([(82.1, 81.2, 83.0), (79.0, 78.5, 80.5), (70.0, None, None)], ["82.1 ± 0.9", "79.0 [78.5, 80.5]", "70.0"]),
        ([True, False, None], ["yes", "no", "–"]),
        (["a", 2, None], ["a", "2", "–"]),
    ],
)
def test_a_column_of_a_table_is_written_alike(values, texts):
    assert [cell.text for cell in column("c", map(plain, values)).cells] == texts


def test_a_column_is_of_numbers_when_all_that_is_there_is_a_number():
    kinds = [column("c", values).kind for values in ([1, None], [(1, 0, 2)], ["a", 1], [True], [None], ["long " * 9])]
    assert kinds == ["number", "number", "word", "word", "word", "prose"]


def test_a_format_string_writes_the_numbers_of_a_column():
    assert [cell.text for cell in column("c", [0.5, None, "n/a"], "{:.1%}").cells] == ["50.0%", "–", "n/a"]
