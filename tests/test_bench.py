"""`foreword bench`: what is measured is there and finite, and the paths are those that were taken."""

import json

import pytest

import foreword as fw
import tiny
import zoo
from foreword.bench import FROZEN, bench, kernel_paths
from foreword.cli import main


def test_every_arm_has_its_cost_and_the_frozen_model_is_one():
    model = tiny.model()
    costs = bench(model, ["prefix-tuning", "lora", [fw.ZeroInit(), "parallel-adapter"]], rows=2, tokens=8, rounds=2)
    assert list(costs) == [FROZEN, "prefix-tuning", "lora", "zero-init + parallel-adapter"]
    assert costs[FROZEN].step_ratio == costs[FROZEN].decode_ratio == 1
    assert all(cost.step > 0 and cost.decode > 0 for cost in costs.values())
    assert fw.adapters(model) == []


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_paths_are_grouped_by_layer(architecture):
    model = zoo.make(architecture)
    rows = kernel_paths(model, [fw.PrefixTuning(length=3, layers=2)])
    assert [row["layers"] for row in rows] == ["0", "1–2"]
    assert rows[0]["training"] == rows[0]["decoding"] == "–"
    path = rows[1]["training"]
    assert path == "fused" if architecture == "llama" else path.startswith("reference: ")


def test_the_command_prints_json(tmp_path, capsys):
    folder = str(tiny.save(tmp_path / "base"))
    assert main(["bench", "--model", folder, "--rows", "1", "--tokens", "8", "--rounds", "1", "--json", "true"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {FROZEN, "prefix-tuning"}
    assert main(["bench", "--model", folder, "--kernels", "true", "--method", "zero-init"]) == 0
    assert "fused" in capsys.readouterr().out
