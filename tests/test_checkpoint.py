"""Adapters in files: round trips, and saving that nothing interrupts."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import foreword as fw
import saver
import zoo
from conformance import shake, small, text
from foreword import checkpoint, files
from surroundings import attach_or_skip, is_one_line

METHOD = fw.PrefixTuning(length=4, layers=2)


@pytest.fixture
def model():
    return zoo.make("llama")


@pytest.fixture
def folder(tmp_path):
    """An adapter for the llama of the zoo."""
    adapter = fw.attach(zoo.make("llama"), METHOD)
    shake(adapter)
    return adapter.save(tmp_path / "adapter")


def weights_of(folder):
    (path,) = folder.glob("*.safetensors")
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_come_back_bit_for_bit(tmp_path, dtype):
    adapter = fw.attach(zoo.make("llama", dtype), METHOD)
    shake(adapter)
    adapter.save(tmp_path)
    loaded = fw.load(zoo.make("llama", dtype), tmp_path, name="other")
    assert loaded.name == "other"
    assert loaded.methods == adapter.methods
    assert loaded.state_dict().keys() == adapter.state_dict().keys()
    for name, tensor in adapter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert loaded.state_dict()[name].dtype == tensor.dtype


def test_training_goes_on_after_loading(tmp_path):
    """The reparameterisation is in the file, so a loaded adapter trains as the saved one would have."""
    model = zoo.make("llama")
    adapter = fw.attach(model, fw.PrefixTuning(length=4, reparam="shared", hidden=8, frozen_tokens=0))
    shake(adapter)
    adapter.save(tmp_path)
    loaded = fw.load(zoo.make("llama"), tmp_path)
    assert loaded.num_trainable == adapter.num_trainable
    for one in (adapter, loaded):
        one.model(text()).logits.pow(2).mean().backward()
    for name, parameter in adapter.named_parameters().items():
        assert torch.equal(loaded.named_parameters()[name].grad, parameter.grad)


def test_a_folded_adapter(tmp_path):
    model = zoo.make("llama")
    adapter = fw.attach(model, fw.PrefixTuning(length=4, reparam="per-layer", hidden=8)).fold()
    expected = model(text()).logits
    adapter.save(tmp_path)
    loaded = fw.load(zoo.make("llama"), tmp_path)
    assert loaded.folded
    assert loaded.num_trainable == loaded.num_stored == adapter.num_stored
    assert torch.equal(loaded.model(text()).logits, expected)


def test_frozen_tokens_are_in_the_file(tmp_path, model):
    adapter = fw.attach(model, fw.PrefixTuning(length=4, frozen_tokens=1), init_ids=[9, 8, 7, 6])
    adapter.save(tmp_path)
    loaded = fw.load(zoo.make("llama"), tmp_path)
    assert torch.equal(loaded.model(text()).logits, model(text()).logits)
    assert loaded.num_trainable * 4 == adapter.num_stored * 3


def test_several_methods(tmp_path, model):
    shake(fw.attach(model, [METHOD, fw.ZeroInit(length=2)]))
    expected = model(text()).logits
    model.foreword.adapters["default"].save(tmp_path)
    loaded = fw.load(zoo.make("llama"), tmp_path)
    assert loaded.methods == [METHOD, fw.ZeroInit(length=2)]
    assert torch.equal(loaded.model(text()).logits, expected)


def test_saving_over_another_adapter(folder, model):
    other = fw.attach(model, fw.ZeroInit(length=3))
    assert other.save(folder) == folder
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert fw.load(zoo.make("llama"), folder).methods == [fw.ZeroInit(length=3)]


def test_only_json_and_safetensors(folder):
    visible = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert visible == {"adapter.json", weights_of(folder).name}
    assert json.loads((folder / "adapter.json").read_text())["methods"] == [METHOD.to_dict()]


def test_loading_beside_others_makes_it_active(folder, model):
    fw.attach(model, "zero-init", name="first")
    fw.load(model, folder, name="second")
    assert fw.adapters(model) == ["first", "second"]
    with_second = model(text()).logits
    fw.set_active(model, "first")
    assert not torch.equal(model(text()).logits, with_second)


def test_another_class_of_the_same_model(folder):
    """Names in the file don't depend on the head: the bare model takes the adapter."""
    whole = zoo.make("llama")
    fw.load(whole, folder)
    bare = zoo.make("llama").model
    fw.load(bare, folder)
    assert torch.equal(whole.lm_head(bare(text()).last_hidden_state), whole(text()).logits)


@pytest.mark.parametrize("name", fw.methods())
def test_every_method_writes_what_it_reads(name, tmp_path):
    """Loaded, the configuration and the names and shapes of every tensor are the saved ones."""
    adapter = attach_or_skip(zoo.make("llama"), small(name))
    shake(adapter)
    adapter.save(tmp_path)
    loaded = fw.load(zoo.make("llama"), tmp_path)
    assert loaded.methods == adapter.methods
    for key, tensor in adapter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def test_saving_to_a_file(tmp_path, model):
    (tmp_path / "taken").write_text("mine")
    adapter = fw.attach(model, METHOD)
    for path in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(fw.ForewordError, match="taken") as error:
            adapter.save(path)
        assert is_one_line(error.value)
    assert (tmp_path / "taken").read_text() == "mine"


def test_saving_to_a_folder_that_cannot_be_written(folder, model):
    folder.chmod(0o555)
    try:
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(fw.ForewordError, match="can't save"):
            fw.attach(model, "zero-init").save(folder)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("fails", ["write_bytes", "write_text", "replace", "fsync"])
def test_a_full_disk_leaves_what_was_there(folder, model, monkeypatch, fails):
    """Whichever step meets the end of the disk, the old adapter loads and no half file stays."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    names = {path.name for path in folder.iterdir()}
    adapter = fw.attach(model, fw.ZeroInit(length=3))
    with monkeypatch.context() as patch:
        patch.setattr(Path if fails.startswith("write") else files.os, fails, full)
        with pytest.raises(fw.ForewordError, match="No space left on device") as error:
            adapter.save(folder)
    assert is_one_line(error.value)
    assert fw.load(zoo.make("llama"), folder).methods == [METHOD]
    if fails != "write_text":  # the new weights are whole by then; the next save takes them away
        assert {path.name for path in folder.iterdir()} == names
    adapter.save(folder)
    assert len({path.name for path in folder.iterdir()}) == len(names)


@pytest.fixture(scope="module")
def processes():
    """Starts processes that have the library imported already, so that they save within milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["foreword", "transformers.models.llama.modeling_llama"])
    return context


def whole(folder, model):
    """The one number that fills the adapter of a `saver`; fails where two savings are mixed."""
    adapter = fw.load(model, folder)
    (value,) = {value for tensor in adapter.state_dict().values() for value in tensor.unique().tolist()}
    fw.detach(model, "default")
    return value


def start_saver(processes, folder):
    """A process that has saved to `folder` once and goes on."""
    started = processes.Event()
    process = processes.Process(target=saver.save_forever, args=(folder, started))
    process.start()
    assert started.wait(timeout=120)
    return process


def test_killed_at_any_moment_the_folder_loads(tmp_path, model, processes):
    """SIGKILL at random moments of a process that saves in a loop; each time the folder holds one whole adapter.

    20 of them, or as many as FOREWORD_KILLS says.
    """
    folder = tmp_path / "adapter"
    draw = random.Random(0)
    for _ in range(int(os.environ.get("FOREWORD_KILLS", "20"))):
        process = start_saver(processes, folder)
        time.sleep(draw.uniform(0.0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert whole(folder, model) >= 1
    fw.attach(model, METHOD).save(folder)
    assert len([path for path in folder.iterdir() if path.name != ".lock"]) == 2  # what was cut off is cleared away


def test_two_processes_save_to_one_folder_while_a_third_loads(tmp_path, model, processes):
    folder = tmp_path / "adapter"
    savers = [start_saver(processes, folder) for _ in range(2)]
    try:
        seen = {whole(folder, model) for _ in range(200)}
        assert all(process.is_alive() for process in savers)
    finally:
        for process in savers:
            process.kill()
            process.join()
    assert len(seen) > 1
    assert whole(folder, model) >= 1


@pytest.mark.parametrize("again", [False, True], ids=["once", "and the first again"])
def test_saved_by_another_process_between_the_two_files(folder, model, monkeypatch, again):
    """The weights that the JSON named are gone when they are opened, since a newer adapter has replaced both.

    Where the first adapter is then saved again, the JSON names the same weights as it did at first.
    """
    first, other = fw.load(zoo.make("llama"), folder), fw.attach(zoo.make("llama"), fw.ZeroInit(length=3))
    read_config, reads = checkpoint.read_config, []

    def interrupted(path):
        reads.append(path)
        if len(reads) == 2 and again:
            first.save(folder)
        config = read_config(path)
        if len(reads) == 1:
            other.save(folder)
        return config

    monkeypatch.setattr(checkpoint, "read_config", interrupted)
    assert fw.load(model, folder).methods == (first if again else other).methods


def test_saved_by_another_process_while_the_weights_are_read(folder, model, monkeypatch):
    """A file that is open stays whole, though its name is gone."""
    other = fw.attach(zoo.make("llama"), fw.ZeroInit(length=3))
    from_bytes = checkpoint.from_bytes

    def interrupted(data):
        other.save(folder)
        return from_bytes(data)

    monkeypatch.setattr(checkpoint, "from_bytes", interrupted)
    assert fw.load(model, folder).methods == [METHOD]
