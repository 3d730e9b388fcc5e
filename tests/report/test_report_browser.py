"""The page in headless Chromium: it draws, sorts, offers its data, fits a phone, and leaves the console silent."""

import csv
import html
import io
import json
import math
from pathlib import Path

import pytest

from browser import ask, needs_chromium, visit
from foreword.report import Report

pytestmark = needs_chromium

ROWS = [
    {"method": "lora", "accuracy": 0.9, "parameters": 1_000_000, "seconds": (31.0, 30.0, 32.0)},
    {"method": "prefix-tuning", "accuracy": 0.85, "parameters": 92_160, "seconds": None},
    {"method": "IA3", "accuracy": -0.5, "parameters": 9_000, "seconds": (4.0, 3.0, 5.0)},
    {"method": 'layers 10, "top"', "accuracy": 1e-6, "parameters": 368_640, "seconds": (100.0, 90.0, 120.0)},
    {"method": "layers 9\nline", "accuracy": math.nan, "parameters": 0, "seconds": (9.0, 8.0, 10.0)},
]


def report() -> Report:
    made = Report("Zero-init on TREC", subtitle="a-subtitle-without-any-place-to-break-" * 4)
    made.facts({"held-out score": "18.6 → 91.2 %", "adapter": "368 KB"})
    made.code("foreword chat --adapter out/demo --a-flag " * 6)
    made.table("Scores", ROWS, note="<b>not bold</b>")
    made.lines(
        "Loss", {"a": [(k, 1 / k) for k in range(1, 500)], "b": [(1, 1, 0, 2), (9, 1, 0, 2)]}, "step", "loss", "xy"
    )
    made.scatter("Accuracy", [{"label": f"m{k}", "x": 10**k, "y": k} for k in range(6)], log="x", frontier="higher")
    made.bars("Mass", {"a": range(30), "b": range(30)}, categories=range(30), x="layer", y="mass")
    made.bars("Difference", {"points": [1, -2, 3]}, categories=["a-very-long-name-of-a-method" * 2, "b", "c"])
    made.heatmap("Gates", [[k / 9 - 0.5 for k in range(9)]] * 30, "layer", "head")
    made.heatmap("Rows", [[k / 64 for k in range(64)]] * 4, "layer", "row")
    made.samples("Outputs", ["input", "after"], [{"input": "in " * 300, "after": "x" * 500}])
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def test_the_console_shows_what_the_policy_refuses(path):
    _, console = visit(path, report().html(), "document.title = 'changed';", allowed=False)
    assert any("Content Security Policy" in line for line in console)


def test_every_chart_draws_inside_the_page(path):
    boxes = ask(
        path,
        report().html(),
        """[...document.querySelectorAll("figure")].map((figure) => {
             const shown = [...figure.querySelectorAll("svg.chart")].filter((svg) => svg.checkVisibility());
             const box = shown[0].getBBox(), page = shown[0].getBoundingClientRect();
             return [shown.length, box.width, box.height, page.left, page.right, innerWidth];
           })""",
        "--window-size=1000,800",
    )
    assert len(boxes) == 6
    for count, width, height, left, right, window in boxes:
        assert count == 1
        assert width > 200
        assert height > 60
        assert 0 <= left < right <= window


@pytest.mark.parametrize(
    ("column", "ascending"),
    [
        (0, ["IA3", "layers 9 line", 'layers 10, "top"', "lora", "prefix-tuning"]),
        (1, ["−0.5", "1e-6", "0.85", "0.9", "–"]),
        (2, ["0", "9,000", "92,160", "368,640", "1,000,000"]),
        (3, ["4 ± 1", "9 ± 1", "31 ± 1", "100 [90, 120]", "–"]),
    ],
)
def test_a_click_on_a_heading_sorts_and_a_second_one_reverses(path, column, ascending):
    first, second, states = ask(
        path,
        report().html(),
        f"""(() => {{
             const table = document.querySelector("table.sortable"), heading = table.tHead.rows[0].cells[{column}];
             const read = () => [...table.tBodies[0].rows].map((row) =>
               row.cells[{column}].textContent.replaceAll("\\n", " "));
             const states = [heading.getAttribute("aria-sort")], orders = [];
             for (let turn = 0; turn < 2; turn++) {{
               heading.querySelector("button").click();
               states.push(heading.getAttribute("aria-sort"));
               orders.push(read());
             }}
             table.tHead.rows[0].cells[{(column + 1) % 4}].querySelector("button").click();
             return [...orders, [...states, heading.getAttribute("aria-sort")]];
           }})()""",
    )
    present = [text for text in ascending if text != "–"]
    missing = [text for text in ascending if text == "–"]
    assert first == ascending
    assert second == present[::-1] + missing  # what is missing stays at the end
    assert states == [None, "ascending", "descending", None]


def test_the_downloads_hold_the_data(path):
    name, text_csv, json_name, text_json = ask(
        path,
        report().html(),
        """(async () => {
             const blobs = [], names = [];
             URL.createObjectURL = (blob) => { blobs.push(blob); return "#"; };
             HTMLAnchorElement.prototype.click = function () { names.push(this.download); };
             const offer = document.querySelector("table.sortable").closest(".block").querySelector(".downloads");
             for (const button of offer.querySelectorAll("button")) button.click();
             return [names[0], await blobs[0].text(), names[1], await blobs[1].text()];
           })()""",
    )
    assert (name, json_name) == ("scores.csv", "scores.json")
    records = json.loads(text_json)
    assert [row["method"] for row in records] == [row["method"] for row in ROWS]
    assert records[0]["seconds high"] == 32
    rows = list(csv.DictReader(io.StringIO(text_csv, newline="")))
    assert list(rows[0]) == ["method", "accuracy", "parameters", "seconds", "seconds low", "seconds high"]
    for row, record in zip(rows, records, strict=True):
        assert row["method"] == record["method"]
        assert row["accuracy"] == "" if record["accuracy"] is None else float(row["accuracy"]) == record["accuracy"]


def test_a_mark_under_the_pointer_shows_its_values(path):
    shown, gone = ask(
        path,
        report().html(),
        """(() => {
             const tip = document.querySelector(".tip");
             const move = (at) => at.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
             const mark = document.querySelector('[data-tip^="m3"]');
             move(mark);
             const shown = tip.checkVisibility() && tip.textContent;
             move(document.body);
             return [shown, tip.checkVisibility()];
           })()""",
    )
    assert shown == "m3\nx: 1,000\ny: 3"
    assert gone is False


def test_a_phone_scrolls_tables_but_not_the_page(path):
    # A headless window is at least 500 units wide, so the phone is a frame inside of one.
    phone = html.escape(report().html())
    width, scrolled, table, drawn, smallest = ask(
        path,
        f'<body><iframe style="border:0;width:360px;height:800px" srcdoc="{phone}"></iframe></body>',
        """new Promise((resolve) => {
             const frame = document.querySelector("iframe");
             const measure = () => {
               const inside = frame.contentDocument, root = inside.documentElement;
               const table = inside.querySelector(".scroll");
               const shown = [...inside.querySelectorAll("svg.chart")].filter((svg) => svg.checkVisibility());
               const heights = shown.flatMap((svg) => [...svg.querySelectorAll("text")].map((text) =>
                 parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a));
               resolve([root.clientWidth, root.scrollWidth, table.scrollWidth > table.clientWidth, shown.length,
                        Math.min(...heights)]);
             };
             frame.contentDocument.querySelector("footer") ? measure() : frame.addEventListener("load", measure);
           })""",
        "--hide-scrollbars",
    )
    assert width == scrolled == 360
    assert table
    assert drawn == 6
    assert smallest >= 10  # labels stay readable


@pytest.mark.parametrize(("scheme", "dark"), [("0", True), ("1", False)])
def test_the_page_follows_the_colour_scheme(path, scheme, dark):
    paper, ink = ask(
        path,
        report().html(),
        """["backgroundColor", "color"].map((name) =>
             getComputedStyle(document.body)[name].match(/\\d+/g).reduce((sum, part) => sum + Number(part), 0))""",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    assert (paper < ink) is dark
