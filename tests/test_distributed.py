"""Training on two processes equals training on one with the same global batch; adapters are saved once and whole."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import socket
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import foreword as fw
import ranks
import tiny
import zoo

METHODS = {
    "prefix-tuning": fw.PrefixTuning(length=4),
    "prefix-tuning, shared": fw.PrefixTuning(length=4, reparam="shared", hidden=8),
    "prefix-tuning, frozen": fw.PrefixTuning(length=4, frozen_tokens=1),
    "zero-init": fw.ZeroInit(length=4, opening=0.3),
    "deep-prompt": fw.DeepPrompt(length=4),
    "parallel-adapter": fw.ParallelAdapter(bottleneck=4),
}


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["foreword.train", "transformers.models.llama.modeling_llama", "tiny", "ranks"])
    return context


def run(processes, world: int, work: Callable[..., None], *args) -> None:
    """`work` with `args` on `world` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [processes.Process(target=ranks.as_rank, args=(r, world, port, work, *args)) for r in range(world)]
    for process in started:
        process.start()
    running = {process.sentinel: process for process in started}
    while running:
        for sentinel in connection.wait(running):
            if running.pop(sentinel).exitcode:  # the others would wait for it
                for process in running.values():
                    process.terminate()
    assert [process.exitcode for process in started] == [0] * world


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [path] = folder.glob("*.safetensors")
    return load_file(path)


def assert_close(ours: Path, theirs: Path) -> None:
    expected = weights(theirs)
    assert weights(ours).keys() == expected.keys()
    for name, tensor in weights(ours).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)


def losses(folder: Path) -> torch.Tensor:
    history = json.loads((folder / "training.json").read_text())["history"]
    return torch.tensor([line["loss"] for line in history if "loss" in line])


@pytest.mark.parametrize("name", ["prefix-tuning", "prefix-tuning, shared", "zero-init"])
def test_ddp_trains_as_one_process(name, processes, tmp_path):
    method = METHODS[name].to_dict()
    run(processes, 1, ranks.train, tmp_path / "one", method, 8)
    run(processes, 2, ranks.train, tmp_path / "two", method, 4)
    assert_close(tmp_path / "two", tmp_path / "one")
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-4, rtol=1e-4)
    if name == "prefix-tuning":  # and a run that was cut off is resumed
        shutil.rmtree(tmp_path / "two" / "checkpoints" / "checkpoint-4")
        for file in (tmp_path / "two").glob("*.*"):
            file.unlink()
        run(processes, 2, ranks.train, tmp_path / "two", method, 4, True)
        assert_close(tmp_path / "two", tmp_path / "one")


def test_one_process_clears_the_folder_of_a_finished_run(processes, tmp_path):
    method = METHODS["prefix-tuning"].to_dict()
    run(processes, 2, ranks.train, tmp_path, method, 4)
    run(processes, 2, ranks.train_slowly_removing, tmp_path, method, 4)
    assert weights(tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_fsdp2_trains_as_one_process(name, processes, tmp_path):
    """And saves one whole adapter, which fills a sharded one again bit for bit."""
    method = METHODS[name].to_dict()
    for world, folder in ((1, "one"), (2, "two")):
        run(processes, world, ranks.shard, tmp_path / folder, method, 8 // world)
    assert_close(tmp_path / "two" / "trained", tmp_path / "one" / "trained")
    trained, restored = (weights(tmp_path / "two" / part) for part in ("trained", "restored"))
    assert all(torch.equal(restored[name], tensor) for name, tensor in trained.items())
    adapter = fw.load(tiny.model(), tmp_path / "two" / "trained")
    before = fw.attach(tiny.model(), adapter.methods).state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in adapter.state_dict().items())


def test_prompt_tuning_under_fsdp2_is_refused(processes, tmp_path):
    run(
        processes,
        1,
        ranks.refuses_to_shard,
        fw.PromptTuning(length=4).to_dict(),
        "prompt-tuning can't train under FSDP2",
    )


def test_split_models_are_refused():
    model = zoo.make("llama")
    model._tp_size = 2
    with pytest.raises(fw.ForewordError, match="tensor-parallel plan"):
        fw.attach(model, "zero-init")
    model = zoo.make("llama")
    next(model.parameters()).ds_id = 0
    with pytest.raises(fw.ForewordError, match="ZeRO-3"):
        fw.attach(model, "zero-init")
    assert not hasattr(model, "foreword")
