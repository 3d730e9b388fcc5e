"""Studies on a tiny model: what they measure, equal budgets, killing, and the report."""

import json
import math
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from small_study import write_study

import foreword as fw
import tiny
from browser import ask, needs_chromium
from foreword.cells import Outcome
from foreword.cli import main
from foreword.compare import cell, compare, read_study
from foreword.compare.budget import steps_within
from foreword.compare.comparison import cells_of
from foreword.compare.insight import gates, prefix_mass
from foreword.compare.sweep import best_rates, tried, tries
from foreword.errors import ForewordError

RATES = [0.5 * fw.ZeroInit.learning_rate, 2 * fw.ZeroInit.learning_rate]  # that a search by the factors 0.5 and 2 tries


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study with everything in it, and its folder."""
    folder = tmp_path_factory.mktemp("study")
    study = read_study(write_study(folder, fractions=[0.5, 1], learning_rates={"factors": [0.5, 2]}))
    return compare(study, folder / "out", workers=1, threads=1), folder / "out"


def test_every_cell_becomes_a_row_with_its_interval(done):
    result, folder = done
    assert result["failed"] is None
    assert result["cells"] == {"complete": 9, "of": 9}
    keys = {(row["method"], row["fraction"]) for row in result["table"]}
    assert keys == {("frozen", 1.0), ("zero", 0.5), ("zero", 1), ("prefix", 0.5), ("prefix", 1)}
    for row in result["table"]:
        value, low, high = row["score"]
        assert low <= value <= high
        assert row["seeds"] == (1 if row["method"] == "frozen" else 2)
    rows = json.loads((folder / "cells.json").read_text())
    assert all(len(row["items"]) == 12 for row in rows)
    assert result == json.loads((folder / "results.json").read_text())
    assert (folder / "study.yaml").exists()


def test_each_run_has_its_folder(done):
    _, folder = done
    cell = folder / "cells" / "words.zero.1.steps3.seed1"
    assert (cell / "adapter" / "adapter.json").exists()
    assert len((cell / "records" / "words.jsonl").read_text().splitlines()) == 12
    record = json.loads(cell.with_suffix(".seed1.json").read_text())
    assert [step for step, _ in record["result"]["losses"]] == [1, 2, 3]
    assert record["result"]["seconds"]["train"] > 0
    if pytest.importorskip("tensorboard", reason="tensorboard is not installed"):
        assert list((cell / "tensorboard").glob("events*"))


def test_the_sweep_is_used_and_counted(done):
    result, _ = done
    losses = {row["learning_rate"]: row["held-out loss"] for row in result["learning_rates"]}
    assert sorted(losses) == RATES
    best = min(losses, key=lambda rate: losses[rate])
    used = {row["method"]: row["learning_rate"] for row in result["table"]}
    assert used == {"frozen": None, "zero": best, "prefix": 0.02}  # what a study sets is not searched for
    assert 0 < result["cost"]["hours of the learning-rate sweep"] <= result["cost"]["hours"]


def test_a_second_run_computes_nothing(done, study_file):
    result, folder = done
    study = read_study(folder.parent / "study.yaml")
    again = compare(study, folder, workers=1, threads=1)
    assert again == result
    assert compare(study, folder, collect=True) == result


def test_a_method_that_diverges_keeps_its_own_rate(study_file):
    study = read_study(study_file(learning_rates={"factors": [0.5, 2]}))
    cells = tries(study, study.entries)
    assert [cell.name for cell in cells] == [f"rate.words.zero.{rate:.2g}" for rate in RATES]
    rows = tried([Outcome(cell, {"loss": None}) for cell in cells])
    assert [row["held-out loss"] for row in rows] == [None, None]
    assert best_rates(rows, study) == {}
    rows = tried([Outcome(cells[0], error="killed"), Outcome(cells[1], {"loss": 1.0})])
    assert best_rates(rows, study) == {("words", "zero"): RATES[1]}
    (own, *_) = [cell for cell in cells_of(study, study.entries, {}) if "zero" in cell.name]
    assert own.arguments["learning_rate"] == fw.ZeroInit.learning_rate


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_try_whose_held_out_loss_is_no_number_has_diverged(study_file, tmp_path, monkeypatch, loss):
    monkeypatch.setattr(cell, "train", lambda *args, **kwargs: SimpleNamespace(history=[{"eval_loss": loss}]))
    study = read_study(study_file(learning_rates={"factors": [1]}))
    (one,) = tries(study, study.entries)
    assert one.function(**one.arguments, folder=tmp_path) == {"loss": None}


def test_a_run_that_diverges_is_no_result_and_a_try_that_does_no_failure(study_file, tmp_path):
    methods = {"tame": "adapter", "wild": {"method": "adapter", "learning_rate": 1e22}}
    study = read_study(study_file(methods=methods, seeds=1, learning_rates={"factors": [1, 1e25]}))
    result = compare(study, tmp_path / "out", workers=1, threads=1)
    tame, wild = (row["held-out loss"] for row in result["learning_rates"])
    assert tame > 0
    assert wild is None
    assert result["failed"].startswith("1 of 4 cells failed: words.wild.1.steps3.seed0 (foreword.trainer.Diverged: ")
    assert [row["method"] for row in result["table"]] == ["tame"]


def test_a_study_that_has_to_wait_leaves_the_folder_as_it_is(study_file, tmp_path):
    (tmp_path / "out" / "cells").mkdir(parents=True)
    (tmp_path / "out" / "study.yaml").write_text("# of the run that is at work\n")
    with FileLock(tmp_path / "out" / "cells" / ".lock"), pytest.raises(ForewordError, match="another run is working"):
        compare(read_study(study_file()), tmp_path / "out", workers=1)
    assert (tmp_path / "out" / "study.yaml").read_text() == "# of the run that is at work\n"


def test_methods_that_compose_take_the_lowest_of_their_rates(study_file):
    study = read_study(study_file(methods={"both": ["zero-init", "lora"]}, learning_rates={"factors": [1]}))
    assert [cell.arguments["learning_rate"] for cell in tries(study, study.entries)] == [fw.Lora.learning_rate]
    assert cells_of(study, study.entries, {})[0].arguments["learning_rate"] == fw.Lora.learning_rate


def test_gpus_are_asked_of_ray_alone(study_file, capsys):
    assert main(["compare", str(study_file()), "--gpus", "1"]) == 2
    assert "add --backend ray" in capsys.readouterr().err


def test_one_task_can_stand_for_all_in_the_search(study_file):
    tasks = {"words": {"train": "words.jsonl", "dev_size": 6}, "restaurant": None}
    study = read_study(study_file(tasks=tasks, learning_rates={"factors": [0.5, 2], "task": "words"}))
    cells = tries(study, study.entries)
    assert len(cells) == 2
    rates = best_rates(tried([Outcome(cell, {"loss": rank}) for rank, cell in enumerate(cells)]), study)
    assert rates == {("words", "zero"): RATES[0], ("restaurant", "zero"): RATES[0]}


def test_equal_parameters(study_file, tmp_path):
    methods = {"zero": "zero-init", "lora": "lora", "full": {"method": "full", "fit": False}}
    study = read_study(study_file(methods=methods, budget={"parameters": 900}, seeds=1))
    result = compare(study, tmp_path / "out", workers=1, threads=1)
    sizes = {row["method"]: row["trainable"] for row in result["table"]}
    assert 800 < sizes["zero"] <= 900
    assert 600 < sizes["lora"] <= 900
    assert sizes["full"] > 900
    with pytest.raises(ForewordError, match=r"methods: full: full trains at least .* set `fit: false`"):
        compare(read_study(study_file(methods={"full": "full"}, budget={"parameters": 900})), tmp_path / "refused")
    both = {"both": ["zero-init", "lora"]}
    with pytest.raises(ForewordError, match="methods: both: a composition has no one size"):
        compare(read_study(study_file(methods=both, budget={"parameters": 900})), tmp_path / "refused")


def test_equal_time(study_file, tmp_path):
    assert steps_within(10.0, lambda steps: 0.5 * steps, tmp_path) == 20
    assert steps_within(10.0, lambda steps: 2.0 * steps, tmp_path) == 20  # as it was decided first
    study = read_study(study_file(methods={"zero": "zero-init"}, seeds=1, train_for=[{"seconds": 0.3}]))
    (row,) = compare(study, tmp_path / "out", workers=1, threads=1)["table"]
    assert row["steps"] >= 1
    assert row["length"] == "seconds0.3"


def test_a_failing_run_is_named_and_the_others_count(study_file, tmp_path):
    methods = {"zero": "zero-init", "biases": "bitfit"}  # the tiny model has no biases
    result = compare(read_study(study_file(methods=methods, seeds=1)), tmp_path / "out", workers=1, threads=1)
    assert "words.biases.1.steps3.seed0 (foreword.errors.ForewordError: bitfit has nothing to train" in result["failed"]
    assert [row["method"] for row in result["table"]] == ["zero"]
    assert "bitfit has nothing to train" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("backend", ["processes", "ray"])
def test_runs_in_parallel_are_the_same(study_file, backend, tmp_path):
    if backend == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'foreword[ray]'")
    study = read_study(study_file(methods={"zero": "zero-init"}))
    alone = compare(study, tmp_path / "alone", workers=1, threads=1)
    parallel = compare(study, tmp_path / "parallel", workers=2, threads=1, backend=backend)
    assert parallel["cells"] == {"complete": 2, "of": 2}
    assert scores(parallel) == scores(alone)
    if backend == "ray":
        import ray

        ray.shutdown()


def scores(result: dict) -> list:
    """The table without times."""
    timed = ("train_seconds", "test_seconds")
    return [{name: value for name, value in row.items() if name not in timed} for row in result["table"]]


KILLED = """
    import os, random, signal, time
    import torch
    from foreword.compare import compare, read_study
    from foreword.compare.cell import run_cell  # what a study imports, once for all runs

    def begin(output):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            compare(read_study({study!r}), output, workers=1, threads=1)
            os._exit(0)
        return child

    started = time.monotonic()
    assert os.waitpid(begin({whole!r}), 0)[1] == 0
    whole = time.monotonic() - started
    draw, kills = random.Random(0), 0
    while kills < 10:
        child = begin({killed!r})
        time.sleep(draw.uniform(0.01, 0.12) * whole)
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            break  # it was done before
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
    print(kills)
    assert os.waitpid(begin({killed!r}), 0)[1] == 0
"""


def test_a_study_that_is_killed_ten_times_ends_like_one_that_is_not(study_file, tmp_path):
    training = {"per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    path = study_file(fractions=[0.5, 1], training=training, learning_rates={"factors": [0.5, 2]})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    script = textwrap.dedent(KILLED).format(study=str(path), whole=str(whole), killed=str(killed))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10"]
    one, other = (json.loads((folder / "results.json").read_text()) for folder in (whole, killed))
    assert scores(one) == scores(other)
    assert one["statements"] == other["statements"]
    assert one["failed"] is other["failed"] is None


def test_the_share_of_attention_is_that_of_the_softmax():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    adapter = fw.attach(model, fw.PrefixTuning(length=4))
    found = prefix_mass(model, tokenizer, ["some words", "more of them, and others"])
    assert list(found) == ["self.0", "self.1", "self.2"]
    model.set_attn_implementation("eager")
    site = adapter.host.layout.sites[0]
    shares = []
    for text in ("some words", "more of them, and others"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        seen = {}
        handle = site.module.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.update(kwargs), with_kwargs=True
        )
        with torch.no_grad():
            model(ids)
            handle.remove()
            hidden, (cos, sin) = seen["hidden_states"], seen["position_embeddings"]
            query = rotated(site.module.q_proj(hidden).unflatten(-1, (4, 8)).transpose(1, 2), cos, sin)
            key = rotated(site.module.k_proj(hidden).unflatten(-1, (2, 8)).transpose(1, 2), cos, sin)
            prefix, _ = site.module.foreword.adapters["default"]["0"].key_value(site, None)
            keys = torch.cat([prefix[None], key], 2).repeat_interleave(2, 1)  # (1, H, l + T, D)
            scores_ = query @ keys.transpose(-1, -2) / 8**0.5
            length = ids.shape[1]
            hidden_keys = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores_[..., 4:] = scores_[..., 4:].masked_fill(hidden_keys, -torch.inf)
            shares.append(scores_.softmax(-1)[0, :, :, :4].sum(-1))  # (H, T)
    expected = torch.cat(shares, 1).mean(1).tolist()
    assert found["self.0"] == pytest.approx(expected, abs=1e-5)


def rotated(states, cos, sin):
    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], -1)
    return states * cos[:, None] + turned * sin[:, None]


def test_gates_are_those_of_each_head():
    model = tiny.model()
    adapter = fw.attach(model, fw.ZeroInit(length=3, layers=2, opening=0.25))
    assert gates(adapter) == {"self.1": pytest.approx([0.25] * 4), "self.2": pytest.approx([0.25] * 4)}
    fw.detach(model, "default")
    assert gates(fw.attach(model, "lora")) == {}
    assert prefix_mass(model, tiny.tokenizer(), ["words"]) == {}


@pytest.mark.parametrize("method", sorted({*fw.methods()} - {"bitfit"}))  # which the tiny model refuses
def test_every_method_can_be_looked_into(method):
    model = tiny.model()
    adapter = fw.attach(model, method)
    shares = [share for heads in prefix_mass(model, tiny.tokenizer(), ["some words"]).values() for share in heads]
    assert all(0 < share < 1 for share in shares)
    assert bool(shares) == any(getattr(m, "joins_softmax", False) for p in adapter.parts for m in p.modules.values())
    assert all(abs(gate) < 1 for heads in gates(adapter).values() for gate in heads)


@needs_chromium
def test_the_report_draws_and_sorts_without_a_word_on_the_console(done, tmp_path):
    _, folder = done
    page = (folder / "report.html").read_text("utf-8")
    found = ask(
        tmp_path / "report.html",
        page,
        """(() => {
            const titles = [...document.querySelectorAll("h2, h3")].map((title) => title.textContent);
            const table = [...document.querySelectorAll("table.sortable")].find((one) =>
                one.tHead.textContent.includes("learning rate"));
            const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.startsWith("trained"));
            table.tHead.rows[0].cells[column].firstElementChild.click();
            const texts = [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);
            const trained = texts.map((text) => Number(text.replaceAll(",", "")));
            return { titles, trained, drawn: document.querySelectorAll("svg.chart .mark, svg.chart .cell").length };
        })()""",
    )
    text = " | ".join(found["titles"])
    for expected in (
        "against trainable parameters",
        "against seconds of training",
        "How much data",
        "loss",
        "zero on words: tanh(gate)",
        "share of attention",
        "What can be said",
        "The search for learning rates",
    ):
        assert expected in text
    assert found["drawn"] > 20
    assert found["trained"] == sorted(found["trained"])
