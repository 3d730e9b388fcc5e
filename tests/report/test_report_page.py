"""The page: valid, self-contained, escaped everywhere, and its data can be read back."""

import base64
import hashlib
import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_report import Page

from foreword.report import Report
from foreword.report.page import SCRIPT, STYLE

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(1)> "'><b>&amp; ]]> <!-- {{ 7*7 }}"""


def everything(word: str) -> Report:
    """A report with every kind of block and `word` in every place that takes text."""
    report = Report(word, subtitle=word)
    report.section(word)
    report.text(f"{word}\n\n`{word}`")
    report.code(word)
    report.facts({word: word})
    report.table(word, [{word: word, "n": 1}, {word: "b", "n": (2, 1, 3)}], note=word)
    report.samples(word, [word, "after"], [{word: word, "after": word}], note=word)
    report.lines(word, {word: [(0, 1), (1, 2, 1, 3)], "b": [(0, 2)]}, x=word, y="y", dashed=[word], note=word)
    report.scatter(word, [{"label": word, "x": 1, "y": 2}], x=word, y="y", note=word)
    report.bars(word, {word: [1.0], "b": [2.0]}, categories=[word], x=word, y="y", note=word)
    report.heatmap(word, [[0.5]], word, "head", row_labels=[word], column_labels=[word], note=word)
    report.heatmap(word, [[0.5]], "layer", word, row_labels=[word], column_labels=[word], note=word)
    return report


def test_text_from_anywhere_stays_text():
    word = "w" * len(HOSTILE)
    plain, hostile = Page(everything(word).html()), Page(everything(HOSTILE).html())
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in plain.elements]
    assert hostile.text.count(HOSTILE) == plain.text.count(word) > 20
    assert hostile.tags("svg", "chart")[0]["aria-label"].count(HOSTILE) == 2


def test_the_page_is_well_formed_and_its_references_hold():
    page = Page(everything("word").html())
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {attributes["aria-labelledby"] for _, attributes in page.elements if "aria-labelledby" in attributes} <= set(
        ids
    )
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(next_level <= level + 1 for level, next_level in itertools.pairwise(levels))
    assert all(svg.get("role") == "img" and svg.get("aria-label") for svg in page.tags("svg", "chart"))


def test_the_page_asks_nothing_of_the_network_and_runs_no_script_but_its_own():
    html = everything("word").html()
    page = Page(html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html.replace(SCRIPT, ""))
    assert {attributes["href"] for _, attributes in page.elements if "href" in attributes} == {"data:,"}
    assert not any("src" in attributes for _, attributes in page.elements)
    policy = page.tags("meta")[1]["content"]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}';" in policy


cells = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.fixed_dictionaries({"a": cells, "<b>": cells}), min_size=1, max_size=5))
def test_the_data_of_a_table_read_back_as_they_were(rows):
    report = Report("r")
    report.table("t", rows)
    report.samples("s", ["<b>", "a"], rows)
    table, samples = Page(report.html()).data
    assert table == rows
    assert samples == rows


def test_the_data_hold_intervals_as_fields_and_missing_values_as_null():
    report = Report("r")
    report.table("t", [{"score": (0.5, 0.4, 0.6)}, {"score": math.nan}], columns=["score"])
    report.lines("l", {"a": [(1, 2, 0, math.inf), (2, math.nan)]}, x="step", y="loss")
    report.scatter("s", [{"label": "a", "x": 1, "y": 2}])
    report.bars("b", {"a": [1, None]}, ["p", "q"], x="layer", y="mass")
    report.heatmap("h", [[1, 2]], "layer", "head")
    table, lines, scatter, bars, heatmap = Page(report.html()).data
    assert table == [{"score": 0.5, "score low": 0.4, "score high": 0.6}, {"score": None}]
    assert lines == [
        {"series": "a", "step": 1, "loss": 2, "low": 0, "high": None},
        {"series": "a", "step": 2, "loss": None},
    ]
    assert scatter == [{"label": "a", "x": 1, "y": 2}]
    assert bars == [{"series": "a", "layer": "p", "mass": 1}, {"series": "a", "layer": "q", "mass": None}]
    assert heatmap == [{"layer": "0", "head": "0", "value": 1}, {"layer": "0", "head": "1", "value": 2}]


def test_tensors_and_arrays_are_numbers():
    report = Report("r")
    report.table("t", [{"a": torch.tensor(1.5), "b": np.float32(0.25), "c": np.int64(3)}])
    report.lines("l", {"a": torch.tensor([[1.0, 2.0], [2.0, 3.0]])})
    report.heatmap("h", np.eye(2))
    table, lines, heatmap = Page(report.html()).data
    assert table == [{"a": 1.5, "b": 0.25, "c": 3}]
    assert [row["y"] for row in lines] == [2, 3]
    assert [row["value"] for row in heatmap] == [1, 0, 0, 1]


def test_columns_pick_and_order_and_default_to_every_key():
    report = Report("r")
    report.table("t", [{"a": 1}, {"b": 2, "a": 3}])
    report.table("t", [{"a": 1}, {"b": 2, "a": 3}], columns=["b"])
    every, picked = Page(report.html()).data
    assert every == [{"a": 1, "b": None}, {"a": 3, "b": 2}]
    assert picked == [{"b": None}, {"b": 2}]


def test_a_lone_surrogate_does_not_stop_the_page(tmp_path):
    report = Report("r")
    report.samples("s", ["after"], [{"after": "bad \ud800 text"}])
    path = report.write(tmp_path / "deep" / "report.html")
    assert "bad ? text" in path.read_text("utf-8")


def test_the_same_report_is_the_same_file():
    assert everything("word").html() == everything("word").html()


def colours(mode: str) -> dict[str, str]:
    light, dark = STYLE.split("prefers-color-scheme: dark", 1)
    return dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", light if mode == "light" else dark))


def linear(colour: str) -> np.ndarray:
    """The linear sRGB of #rrggbb."""
    value = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_stand_out_from_the_paper(mode):
    palette = colours(mode)
    paper = palette["paper"]
    assert all(contrast(palette[f"s{slot}"], paper) >= 2.99 for slot in range(8))  # graphics: WCAG 1.4.11
    assert all(contrast(palette[name], paper) >= 4.5 for name in ("ink", "soft", "link"))  # text: WCAG 1.4.3


# How protanopes, deuteranopes and tritanopes see linear sRGB (Machado et al., IEEE TVCG 2009, full severity).
VISION = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
# Oklab (Ottosson, 2020): linear sRGB to cones to lightness and two opponent axes.
CONES = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.2119035, 0.68069955, 0.10739696],
    [0.08830246, 0.28171884, 0.62997870],
]
AXES = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.9779985, -2.42859221, 0.45059371],
    [0.0259040, 0.78277177, -0.80867577],
]


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_colours_of_series_differ_for_every_kind_of_sight(mode, vision):
    palette = colours(mode)
    seen = [np.clip(np.array(VISION[vision]) @ linear(palette[f"s{slot}"]), 0, 1) for slot in range(8)]
    places = [np.array(AXES) @ np.cbrt(np.array(CONES) @ colour) for colour in seen]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(places, 2)) > 0.076  # Okabe-Ito
