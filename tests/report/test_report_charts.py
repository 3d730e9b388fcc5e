"""Charts: what is drawn is what the data say, and no data can break a drawing."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_report import Page

from foreword.errors import ForewordError
from foreword.report import Report
from foreword.report.lines import thin
from foreword.report.plot import WIDE, Axis, Plot, Point
from foreword.report.scatter import frontier_of

BARE = (math.nan, math.nan)
number = st.none() | st.floats() | st.integers(-9, 9) | st.floats(-100, 100)


def parse(build) -> Page:
    report = Report("r")
    build(report)
    return Page(report.html())


@settings(max_examples=60, deadline=None)
@given(
    points=st.lists(st.tuples(number, number) | st.tuples(number, number, number, number), max_size=8),
    log=st.sampled_from(["", "x", "y", "xy"]),
)
def test_any_points_make_drawings_with_finite_coordinates_on_the_paper(points, log):
    labelled = [dict(zip(("x", "y", "low", "high"), p, strict=False), label=f"p{i}") for i, p in enumerate(points)]
    values = [point[1] for point in points]

    def build(report):
        report.lines("lines", {"a": points, "b": points[:1]}, log=log)
        report.scatter("scatter", labelled, log=log, frontier="higher")
        report.bars("bars", {"a": values, "b": values}, categories=range(len(values)))
        report.heatmap("heat map", [values, values])

    page = parse(build)
    assert all(math.isfinite(value) and -150 <= value <= 900 for value in page.numbers())


@pytest.mark.parametrize("points", [[], [(1, None)], [(math.nan, 2)], [(0, -1)]])
def test_a_chart_without_anything_to_draw_says_so(points):
    page = parse(lambda report: report.lines("Loss", {"a": points}, log="xy"))
    assert "No data to draw." in page.text
    assert not page.tags("svg", "chart")


def test_a_single_point_is_drawn_with_axes():
    page = parse(lambda report: report.lines("Loss", {"a": [(3, 0.5)]}))
    assert len(page.tags("svg", "chart")) == 2
    assert len(page.tags("path", "mark")) == 2
    assert len(page.tags("path", "grid")) >= 4


def test_a_missing_value_makes_a_gap_and_is_counted():
    page = parse(lambda report: report.lines("Loss", {"a": [(0, 1), (1, 2), (2, None), (3, 4), (4, 5)]}))
    assert len(page.tags("path", "line")) == 2 * 2  # two stretches on each of two papers
    assert "1 of 5 values are missing" in page.text
    assert page.data[0][2] == {"series": "a", "x": 2, "y": None}


def test_values_that_a_logarithmic_axis_cannot_show_are_counted():
    page = parse(lambda report: report.lines("Loss", {"a": [(0, 1), (1, 2), (10, 0)]}, log="xy"))
    assert "2 of 3 values are missing" in page.text


def test_a_long_series_is_thinned_in_the_drawing_but_not_in_the_data():
    rng = random.Random(0)
    points = [Point(float(step), rng.gauss(0, 1), *BARE) for step in range(30_000)]
    plot = Plot.of(WIDE, Axis("x", [0.0, 29_999.0]), Axis("y", [-6.0, 6.0]))
    kept = thin(points, plot)

    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(round(plot.x(point.x)), []).append(point)
    drawn = set(kept)
    assert len(kept) <= 4 * len(columns) <= 4 * WIDE.width
    assert kept == sorted(kept)
    for column in columns.values():
        key = [point.y for point in column]
        assert {column[0], column[key.index(min(key))], column[key.index(max(key))], column[-1]} <= drawn

    report = Report("r")
    report.lines("Loss", {"a": [(point.x, point.y) for point in points]})
    html = report.html()
    assert len(Page(html).data[0]) == len(points)
    assert len(html.split('<script type="application/json"')[0]) < 200_000


def test_a_band_spans_low_to_high():
    page = parse(lambda report: report.lines("Score", {"a": [(0, 5, 0, 10), (1, 5, 0, 10)]}))
    (wide, _) = page.tags("path", "band")
    grid = [float(path["d"].split()[1].split("H")[0]) for path in page.tags("path", "grid")[:6]]
    heights = [float(corner.split()[1].rstrip("Z")) for corner in wide["d"].split("L")]
    assert heights == [min(grid), min(grid), max(grid), max(grid)]  # ticks stand at 0, 2, …, 10


def test_a_band_without_an_interval_at_a_point_closes_on_the_curve():
    page = parse(lambda report: report.lines("Score", {"a": [(0, 5, 0, 10), (1, 5)]}))
    corners = page.tags("path", "band")[0]["d"].split("L")
    assert corners[1] == corners[2]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12), st.sampled_from([1, -1]))
def test_the_frontier_holds_the_points_that_nothing_cheaper_equals(pairs, sign):
    points = [(f"p{index}", Point(float(x), float(sign * y), *BARE)) for index, (x, y) in enumerate(pairs)]
    frontier = {(p.x, sign * p.y) for _, p in frontier_of(points, "higher" if sign == 1 else "lower")}
    expected = {(x, y) for x, y in pairs if not any(u <= x and v >= y and (u, v) != (x, y) for u, v in pairs)}
    assert frontier == expected


def test_names_stand_beside_few_points_and_in_the_legend_on_a_phone():
    points = [{"label": name, "x": 10**k, "y": k / 10} for k, name in enumerate(["lora", "prefix-tuning", "full"])]
    page = parse(lambda report: report.scatter("Accuracy", points, log="x", frontier="higher"))
    assert len(page.tags("text", "point")) == 3
    assert len(page.tags("path", "frontier")) == 2
    assert page.tags("ul", "narrow")
    crowd = [{"label": f"{k}", "x": 1, "y": 1} for k in range(20)]
    page = parse(lambda report: report.scatter("Accuracy", crowd))
    assert not page.tags("text", "point")
    assert not page.tags("ul", "narrow")


def test_bars_stand_on_zero():
    page = parse(lambda report: report.bars("Difference", {"a": [2, -1]}, categories=["x", "y"]))
    up, down = page.tags("rect", "bar")[:2]
    assert float(up["y"]) + float(up["height"]) == pytest.approx(float(down["y"]))
    assert float(up["height"]) == pytest.approx(2 * float(down["height"]), abs=0.1)


def test_a_heat_map_shows_sign_by_hue_and_size_by_opacity():
    page = parse(lambda report: report.heatmap("Gates", [[0.5, -1.0], [0.25, None]], limit=2.0))
    cells = [(cell["class"], float(cell["fill-opacity"])) for cell in page.tags("rect", "cell")]
    assert cells == [("cell", 0.25), ("cell negative", 0.5), ("cell", 0.12)]
    assert len(page.tags("path", "missing")) == 1


def test_small_heat_maps_stand_side_by_side_and_wide_ones_alone():
    page = parse(lambda report: (report.heatmap("a", [[0.1] * 9] * 30), report.heatmap("b", [[0.1] * 64] * 4)))
    assert [figure["class"] for figure in page.tags("figure")] == ["block half", "block"]


def test_a_series_has_one_colour_and_mark_in_every_chart():
    def build(report):
        report.lines("Loss", {"lora": [(0, 1)], "zero-init": [(0, 2)]})
        report.scatter("Accuracy", [{"label": "zero-init", "x": 1, "y": 1}])
        report.bars("Mass", {"new": [1.0], "zero-init": [2.0]}, categories=["layer"])

    groups = [group["class"] for group in parse(build).tags("g")]
    lines, scatter, bars = groups[:8], groups[8:10], groups[10:]
    assert lines == ["s0", "s1"] * 4  # bands and curves, on two papers
    assert scatter == ["s1", "s1"]
    assert bars == ["s2", "s1"] * 2


def test_forty_series_differ_in_colour_mark_or_dashes():
    page = parse(lambda report: report.lines("Loss", {f"s{k}": [(0, k), (1, k)] for k in range(40)}))
    swatches = [attributes["class"] for attributes in page.tags("svg") if "aria-hidden" in attributes]
    shapes = [path["d"] for path in page.tags("path", "mark")][: len(swatches)]
    assert len(set(zip(swatches, shapes, strict=True))) == 40


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda r: r.lines("Loss", {"a": [(1, 2, 3)]}), "chart 'Loss', series 'a': a point is (x, y)"),
        (lambda r: r.bars("Mass", {"a": [1]}, [1, 2]), "bars 'Mass', series 'a': 1 values for 2 categories"),
        (
            lambda r: r.heatmap("Gates", [[1, 2], [3]], rows="layer"),
            "heat map 'Gates', layer 1: 1 values for 2 columns",
        ),
        (lambda r: r.heatmap("Gates", [[1]], row_labels=[1, 2]), "heat map 'Gates': 2 row labels for 1 rows"),
        (lambda r: r.table("T", [{"a": 1}, {"a": (1, 2)}]), "table 'T', row 2, 'a': a tuple is (value, low, high)"),
    ],
)
def test_data_of_the_wrong_shape_is_refused_in_one_line(build, says):
    with pytest.raises(ForewordError) as caught:
        build(Report("r"))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
