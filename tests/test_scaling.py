"""The scaling law against the authors' constants, the accounting against their figures, and the commands."""

from __future__ import annotations

import json
import math
import random

import pytest
from transformers import LlamaConfig

import tiny
from foreword.cli import main
from foreword.errors import ForewordError
from foreword.scaling import GIB, Law, Row, Shape, Workload, bootstrap, cost, fit, held_out, published, read_rows
from foreword.scaling.measure import wider


def rows_of(law: Law, noise: float = 0.0, seed: int = 0) -> list[Row]:
    generator = random.Random(seed)
    sizes = [5e8, 1e9, 2e9, 4e9]
    return [Row(n, p, law.loss(n, p) * math.exp(noise * generator.gauss(0, 1))) for p in (1, 2, 4, 8) for n in sizes]


# ---------------------------------------------------------------------------------------------------------------------
# The law


@pytest.mark.parametrize(("corpus", "e", "alpha", "k"), [("stack", 0.691, 0.189, 0.39), ("pile", 1.289, 0.196, 0.33)])
def test_the_authors_constants(corpus, e, alpha, k):
    found = fit(published(corpus))
    assert pytest.approx(e, abs=6e-4) == found.law.E
    assert found.law.alpha == pytest.approx(alpha, abs=6e-4)
    assert found.law.k == pytest.approx(k, abs=6e-3)
    assert found.r2 > 0.997


def test_the_published_rows():
    assert len(published("stack")) == len(published("pile")) == 24
    assert {row.streams for row in published("pile")} == {1, 2, 4, 8}
    with pytest.raises(ForewordError, match="no published losses for 'wiki'"):
        published("wiki")


def test_exact_rows_give_their_law():
    law = Law(0.8, 2e8, 0.25, 0.5)
    found = fit(rows_of(law))
    assert pytest.approx(law.E, rel=1e-3) == found.law.E
    assert found.law.alpha == pytest.approx(law.alpha, rel=1e-2)
    assert found.law.k == pytest.approx(law.k, rel=1e-2)
    assert found.largest_error < 1e-5


def test_one_wrong_row_moves_little():
    law = Law(0.8, 2e8, 0.25, 0.5)
    rows = rows_of(law, noise=3e-4)
    rows[5] = Row(rows[5].parameters, rows[5].streams, rows[5].loss * 1.2)
    assert fit(rows).law.k == pytest.approx(law.k, rel=0.1)


def test_intervals_hold_the_law_that_made_the_rows():
    law = Law(0.8, 2e8, 0.25, 0.5)
    rows = rows_of(law, noise=2e-3)
    found = fit(rows).law
    intervals = bootstrap(rows, found, resamples=60)
    assert intervals.k[0] < law.k < intervals.k[1]
    assert intervals.k[0] <= found.k <= intervals.k[1]
    assert intervals == bootstrap(rows, found, resamples=60)
    assert intervals != bootstrap(rows, found, resamples=60, seed=1)


def test_rows_left_out_are_predicted():
    checks = held_out(published("stack"))
    assert checks[0].what == "P = 8"
    assert checks[0].largest_error == pytest.approx(0.0045, abs=2e-4)
    assert checks[1].bias == pytest.approx(-0.0077, abs=3e-4)


def test_what_streams_are_worth():
    law = Law(0.8, 2e8, 0.25, 0.5)
    assert law.multiplier(1) == 1
    assert law.loss(1e9, 8) == pytest.approx(law.loss(1e9 * law.multiplier(8), 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters,loss\n1,2\n", "no column 'streams'"),
        ("parameters,streams,loss\n1e9,1,1.5\n1e9,two,1.4\n", "line 3: streams must be a positive number, not 'two'"),
        ("parameters,streams,loss\n1e9,1,-1\n", "line 2: loss must be a positive number"),
        ("parameters,streams,loss\n1e9,1.5,1\n", "line 2: streams must be a whole number"),
        ("parameters,streams,loss\n1e9,1\n", "line 2: loss must be a positive number, not None"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ForewordError, match=message):
        read_rows(path)


def test_too_little_to_fit():
    with pytest.raises(ForewordError, match="4 rows are too few"):
        fit([Row(1e9, p, 1.0) for p in (1, 2, 4, 8)])
    with pytest.raises(ForewordError, match="same parameters"):
        fit([Row(1e9, p, 1.0) for p in (1, 2, 4, 8, 16)])


# ---------------------------------------------------------------------------------------------------------------------
# The cost

THEIRS = Shape(layers=36, hidden=2560, intermediate=13824, query=2560, key=320, vocabulary=151936)  # their 4.4B


@pytest.mark.parametrize(
    ("batch", "streams", "memory", "seconds"),
    [
        (1, 1, 8.86, 0.337),
        (1, 2, 8.90, 0.342),
        (1, 4, 8.94, 0.353),
        (1, 8, 9.02, 0.374),
        (8, 1, 9.02, 0.359),
        (8, 2, 9.23, 0.420),
        (8, 4, 9.38, 0.506),
        (8, 8, 9.67, 0.678),
    ],
)
def test_the_papers_accounting(batch, streams, memory, seconds):
    """What the authors' script prints for the 4.4B model, 64 tokens in and 64 out."""
    found = cost(THEIRS, streams, Workload(batch))
    assert found.memory / GIB == pytest.approx(memory, abs=0.006)
    assert found.seconds == pytest.approx(seconds, rel=0.06)


def test_no_queries_for_prefix_tokens_save_time():
    padded, ours = (cost(THEIRS, 8, Workload(batch=8), padded=padded) for padded in (True, False))
    assert ours.prefill < 0.7 * padded.prefill
    assert ours.decode == padded.decode


def test_streams_are_cheap_at_batch_one_and_dear_in_large_batches():
    factor = fit(published("stack")).law.multiplier(8)
    for batch, cheaper in ((1, True), (8, False)):
        work = Workload(batch)
        base, streams = cost(THEIRS, 1, work), cost(THEIRS, 8, work)
        wide = cost(THEIRS.wider(factor), 1, work)
        assert (streams.seconds - base.seconds < wide.seconds - base.seconds) == cheaper


def test_shapes():
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    shape = Shape.of(config)
    assert (shape.query, shape.key) == (576, 192)
    assert shape.layer_parameters == 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536
    assert shape.wider(2).parameters == pytest.approx(2 * shape.parameters, rel=0.01)
    assert Shape.of(wider(config, 2)).parameters == pytest.approx(2 * shape.parameters, rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# The commands


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = main(["scaling", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_fit_of_a_file(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    lines = [f"{row.parameters},{row.streams},{row.loss}" for row in rows_of(Law(0.8, 2e8, 0.25, 0.5))]
    path.write_text("\n".join(["parameters,streams,loss", *lines]))
    page = tmp_path / "law.html"
    code, out, err = run(capsys, "fit", "--data", path, "--resamples", 5, "--report", page, "--json")
    assert code == 0, err
    constants = {row["constant"]: row for row in json.loads(out)[str(path)]["constants"]}
    assert constants["k"]["value"] == pytest.approx(0.5, rel=0.01)
    assert constants["k"]["low (95 %)"] <= constants["k"]["high (95 %)"]
    assert "P = 8, fitted" in page.read_text()


def test_fit_of_the_published_losses(capsys):
    code, out, _ = run(capsys, "fit", "--corpus", "stack", "--resamples", 0)
    assert code == 0
    assert "0.3935" in out


def test_cost_of_a_model(tmp_path, capsys):
    base = tiny.save(tmp_path / "base")
    page = tmp_path / "cost.html"
    words = ["cost", "--model", base, "--streams", "[1,2]", "--prompt", 8, "--new", 4, "--length", 4, "--rounds", 1]
    code, out, err = run(capsys, *words, "--report", page, "--json")
    assert code == 0, err
    tables = json.loads(out)
    for name in ("By the paper's accounting", "Measured on this machine"):
        assert [row["model"] for row in tables[name]] == ["P = 1", "P = 2", "1.27 × parameters"]
        assert tables[name][1]["more GiB"] > 0
    assert "batch 1 with short text only" in page.read_text()


def test_wrong_questions(capsys, tmp_path):
    code, _, err = run(capsys, "cost", "--model", tmp_path / "nowhere")
    assert code == 2
    assert "can't read the config" in err
    code, _, err = run(capsys, "cost", "--streams", "[2,4]", "--times", "[2]")
    assert code == 2
    assert "a factor for each of P = [2, 4]" in err
