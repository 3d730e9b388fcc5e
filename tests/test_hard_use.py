"""Files, data and options that nobody meant: right, or refused in one line, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import threading
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import foreword as fw
import zoo
from conformance import shake, text
from foreword.cli import main
from foreword.data import load as load_data
from surroundings import State, assert_unchanged, is_one_line, refusal

ROUNDS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture], "derandomize": True}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def model():
    return zoo.make("llama")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    adapter = fw.attach(zoo.make("llama"), fw.PrefixTuning(length=4, layers=2))
    shake(adapter)
    return adapter.save(tmp_path_factory.mktemp("whole") / "adapter")


def loads_or_says_why(model, folder: Path) -> bool:
    """Whether it loads. Otherwise the reason is one line and the model is as it was."""
    before = State.of(model)
    error = refusal(fw.load, model, folder)
    assert error is None or is_one_line(error), error
    if error is None:
        fw.detach(model, "default")
    assert_unchanged(model, before)
    return error is None


def copy_of(whole: Path, tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    return Path(shutil.copytree(whole, tmp_path / "copy"))


# ---------------------------------------------------------------------------------------------------------------------
# Adapter files


@settings(max_examples=40, **ROUNDS)
@given(data=st.data())
def test_any_value_in_the_configuration(whole, model, tmp_path, data):
    folder = copy_of(whole, tmp_path)
    config = json.loads((folder / "adapter.json").read_text())
    place = data.draw(st.sampled_from(["top", "method", "base"]))
    target = {"top": config, "method": config["methods"][0], "base": config["base"]}[place]
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    (folder / "adapter.json").write_text(json.dumps(config))
    loads_or_says_why(model, folder)


@settings(max_examples=30, **ROUNDS)
@given(value=JSON)
def test_any_json_as_the_configuration(whole, model, tmp_path, value):
    folder = copy_of(whole, tmp_path)
    (folder / "adapter.json").write_text(json.dumps(value))
    assert not loads_or_says_why(model, folder)


@settings(max_examples=40, **ROUNDS)
@given(seed=st.integers(0, 10**6), cut=st.booleans())
def test_any_damage_to_the_weights(whole, model, tmp_path, seed, cut):
    """Bytes changed anywhere, in the header for the most part, or the end missing."""
    folder, draw = copy_of(whole, tmp_path), random.Random(seed)
    [path] = folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    if cut:
        content = content[: draw.randrange(len(content))]
    for _ in range(draw.randrange(1, 5) if content else 0):
        content[draw.randrange(len(content) if draw.random() < 0.3 else min(len(content), 600))] = draw.randrange(256)
    path.write_bytes(content)
    loads_or_says_why(model, folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_other_dtypes(whole, model, tmp_path, dtype):
    folder = copy_of(whole, tmp_path)
    [path] = folder.glob("*.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    assert loads_or_says_why(model, folder) == dtype.is_floating_point


HUGE = {
    "a long prefix": {"method": "prefix-tuning", "length": 10**12},
    "one longer than the file": {"method": "prefix-tuning", "length": 200},
    "a wide map": {"method": "prefix-tuning", "length": 4, "reparam": "shared", "hidden": 10**11},
    "a wide adapter": {"method": "parallel-adapter", "bottleneck": 10**11},
    "a high rank": {"method": "lora", "r": 10**11},
    "a rank within the file": {"method": "vera", "r": 500},
    "many streams": {"method": "parscale", "streams": [10**11], "length": 1},
    "a point": {"method": "point", "source": {"class": "Direct", "length": 10**12}, "combine": {"class": "Joint"}},
}


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", HUGE)
def test_huge_sizes_are_refused_before_they_are_made(whole, model, tmp_path, name, folded):
    folder = copy_of(whole, tmp_path)
    config = json.loads((folder / "adapter.json").read_text())
    config |= {"methods": [HUGE[name]], "folded": folded}
    (folder / "adapter.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not loads_or_says_why(model, folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


# ---------------------------------------------------------------------------------------------------------------------
# Data and options

FIELDS = ["prompt", "completion", "messages", "instruction", "output", "text", "choices", "answer", "conversations"]


@settings(max_examples=60, **ROUNDS)
@given(rows=st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_rows_of_data(tmp_path, rows):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = refusal(load_data, str(path))
    assert error is None or (is_one_line(error) and "data.jsonl" in str(error)), error


@settings(max_examples=60, **ROUNDS)
@given(content=st.binary(max_size=80), suffix=st.sampled_from(["jsonl", "json", "csv", "parquet"]))
def test_any_bytes_of_data(tmp_path, content, suffix):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(content)
    error = refusal(load_data, str(path))
    assert error is None or is_one_line(error), error


@settings(max_examples=40, **ROUNDS)
@given(options=st.dictionaries(st.sampled_from(["json", "adapter", "method", "x", "method.length"]), JSON, max_size=3))
def test_any_options_in_a_config_file(tmp_path, capsys, options):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options))
    code = main(["inspect", str(tmp_path), "--config", str(path)])
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("foreword: error: ")
    assert err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Threads, and a thousand adapters


@torch.no_grad()
def test_threads_with_different_adapters_do_not_see_each_other_s():
    model = zoo.make("llama")
    names: list[str | None] = ["a", "b", "c", None]
    for seed, name in enumerate(names[:3]):
        shake(fw.attach(model, fw.PrefixTuning(length=4), name=name), seed=seed)
    ids = text(1)

    def generate(name: str | None) -> list[int]:
        with fw.rows(model, [name]):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        return out[0].tolist()

    expected = {name: generate(name) for name in names}
    assert len({tuple(answer) for answer in expected.values()}) == 4
    wrong: list[str | None] = []

    def work(name: str | None) -> None:
        wrong.extend(name for _ in range(8) if generate(name) != expected[name])

    threads = [threading.Thread(target=work, args=(name,)) for name in names * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def resident() -> int:
    """Memory of this process in KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read the memory from")
def test_a_thousand_loads_leave_no_memory_behind(whole, model, record_property):
    """Loads and detaches, with a forward between; `FOREWORD_LOADS` of them."""
    loads = int(os.environ.get("FOREWORD_LOADS", "1000"))

    def cycle(count: int) -> None:
        for index in range(count):
            fw.load(model, whole, name=f"tenant-{index}")
            if index % 50 == 0:
                with torch.no_grad():
                    model(text(1))
            if index % 10 == 9:
                for name in fw.adapters(model):
                    fw.detach(model, name)

    cycle(100)  # allocators and caches have their size after that
    before = resident()
    cycle(loads)
    grown = resident() - before
    record_property("grown_kib", grown)
    print(f"{loads} loads: {grown:+} KiB of {before} KiB")
    assert fw.adapters(model) == []
    assert grown < 16 * 1024
