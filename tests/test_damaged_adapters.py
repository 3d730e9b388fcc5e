"""Damaged adapter files: each kind is named in one line, and leaves the model as it was."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import foreword as fw
import zoo
from conformance import shake, text
from surroundings import State, assert_unchanged, is_one_line

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


def edit_config(folder, **values):
    path = folder / "adapter.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **values}))


def edit_weights(folder, change):
    tensors = load_file(weights_of(folder))
    change(tensors)
    save_file(tensors, weights_of(folder))


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


def rename_tensor(tensors):
    tensors["0.self.9.source.key"] = tensors.pop("0.self.1.source.key")


def set_tensor(make):
    return lambda tensors: tensors.update({"0.self.1.source.key": make(tensors["0.self.1.source.key"])})


DAMAGE = {
    "no folder": (lambda f: f.rename(f.with_name("elsewhere")), "is not an adapter folder"),
    "no config": (lambda f: (f / "adapter.json").unlink(), "adapter.json"),
    "config is a folder": (lambda f: ((f / "adapter.json").unlink(), (f / "adapter.json").mkdir()), "adapter.json"),
    "no weights": (lambda f: weights_of(f).unlink(), "safetensors"),
    "empty config": (lambda f: truncate(f / "adapter.json", 0), "adapter.json"),
    "half a config": (lambda f: truncate(f / "adapter.json", 90), "adapter.json"),
    "binary config": (lambda f: (f / "adapter.json").write_bytes(b"\xff\xfe\x00"), "adapter.json"),
    "another JSON": (lambda f: (f / "adapter.json").write_text("[1, 2]"), "adapter.json"),
    "deep JSON": (lambda f: (f / "adapter.json").write_text("[" * 100_000), "adapter.json"),
    "huge number": (lambda f: (f / "adapter.json").write_text("1" * 5000), "adapter.json"),
    "no format": (lambda f: edit_config(f, format=None), '"format"'),
    "later format": (lambda f: edit_config(f, format=99), "format 99"),
    "format 0": (lambda f: edit_config(f, format=0), "format"),
    "format true": (lambda f: edit_config(f, format=True), "format"),
    "no methods": (lambda f: edit_config(f, methods=[]), '"methods"'),
    "methods of text": (lambda f: edit_config(f, methods=["zero-init"]), "adapter.json"),
    "methods null": (lambda f: edit_config(f, methods=None), '"methods"'),
    "unknown method": (lambda f: edit_config(f, methods=[{"method": "prefix-tunings"}]), "'prefix-tunings'"),
    "unknown field": (lambda f: edit_config(f, methods=[{"method": "zero-init", "lenght": 3}]), "'lenght'"),
    "field of a wrong type": (lambda f: edit_config(f, methods=[{"method": "zero-init", "length": "3"}]), "length"),
    "std of text": (lambda f: edit_config(f, methods=[{"method": "zero-init", "std": "wide"}]), "std"),
    "attention a number": (lambda f: edit_config(f, methods=[{**METHOD.to_dict(), "attention": 3}]), "attention"),
    "layers an object": (lambda f: edit_config(f, methods=[{**METHOD.to_dict(), "layers": {"a": 1}}]), "layers"),
    "source of text": (lambda f: edit_config(f, methods=[{"method": "point", "source": "Direct"}]), "source"),
    "no combine": (
        lambda f: edit_config(f, methods=[{"method": "point", "source": {"class": "Direct", "length": 2}}]),
        "combine",
    ),
    "folded a word": (lambda f: edit_config(f, folded="no"), '"folded"'),
    "base null": (lambda f: edit_config(f, base=None), '"base"'),
    "base of a list": (lambda f: edit_config(f, base={"architecture": "llama", "attention": [1]}), "adapter"),
    "weights a number": (lambda f: edit_config(f, weights=3), '"weights"'),
    "weights nothing": (lambda f: edit_config(f, weights=""), '"weights"'),
    "weights the parent": (lambda f: edit_config(f, weights=".."), '"weights"'),
    "weights elsewhere": (lambda f: edit_config(f, weights="../adapter.safetensors"), '"weights"'),
    "weights absolute": (lambda f: edit_config(f, weights="/etc/passwd"), '"weights"'),
    "weights below": (lambda f: edit_config(f, weights="sub/adapter.safetensors"), '"weights"'),
    "weights with NUL": (lambda f: edit_config(f, weights="a\0b.safetensors"), '"weights"'),
    "weights the config": (lambda f: edit_config(f, weights="adapter.json"), '"weights"'),
    "empty weights": (lambda f: truncate(weights_of(f), 0), "safetensors"),
    "half the weights": (lambda f: truncate(weights_of(f), weights_of(f).stat().st_size // 2), "safetensors"),
    "one byte short": (lambda f: truncate(weights_of(f), weights_of(f).stat().st_size - 1), "safetensors"),
    "garbage weights": (lambda f: weights_of(f).write_bytes(random.Random(0).randbytes(999)), "safetensors"),
    "a missing tensor": (lambda f: edit_weights(f, lambda t: t.pop("0.self.1.source.key")), "0.self.1.source.key"),
    "a foreign tensor": (lambda f: edit_weights(f, lambda t: t.update(x=torch.zeros(1))), "unknown x"),
    "a renamed tensor": (lambda f: edit_weights(f, rename_tensor), "0.self.1.source.key"),
    "a shorter tensor": (lambda f: edit_weights(f, set_tensor(lambda t: t[:, 1:].contiguous())), "[2, 3, 8]"),
    "a flat tensor": (lambda f: edit_weights(f, set_tensor(lambda t: t.flatten())), "[64]"),
    "integers": (lambda f: edit_weights(f, set_tensor(lambda t: t.long())), "int64"),
    "a NaN": (lambda f: edit_weights(f, set_tensor(lambda t: t.where(t != t[0, 0, 0], torch.nan))), "source.key"),
    "infinity": (lambda f: edit_weights(f, set_tensor(lambda t: t / 0)), "source.key"),
    "another length": (lambda f: edit_config(f, methods=[{**METHOD.to_dict(), "length": 5}]), "shape"),
    "other layers": (lambda f: edit_config(f, methods=[{**METHOD.to_dict(), "layers": 3}]), "self.0"),
    "too many layers": (lambda f: edit_config(f, methods=[{**METHOD.to_dict(), "layers": 9}]), "layers=9"),
    "another method": (lambda f: edit_config(f, methods=[{"method": "zero-init", "length": 4}]), "weights"),
    "claims to be folded": (
        lambda f: edit_config(f, methods=[fw.PrefixTuning(reparam="shared").to_dict()]),
        "its file 256",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_leaves_no_trace(folder, model, damage):
    harm, message = DAMAGE[damage]
    before = State.of(model)
    harm(folder)
    with pytest.raises(fw.ForewordError) as error:
        fw.load(model, folder)
    assert is_one_line(error.value), error.value
    assert message in str(error.value)
    assert_unchanged(model, before)


@pytest.mark.parametrize("damage", ["half the weights", "a NaN", "too many layers", "later format", "a flat tensor"])
def test_damage_leaves_other_adapters_as_they_are(folder, model, damage):
    shake(fw.attach(model, "prefix-tuning", name="present"))
    expected = model(text()).logits
    DAMAGE[damage][0](folder)
    with pytest.raises(fw.ForewordError):
        fw.load(model, folder)
    assert fw.adapters(model) == ["present"]
    assert torch.equal(model(text()).logits, expected)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("gpt2", "for a llama model; this one is gpt2"), ("bart", "llama"), ("mistral", "llama"), ("qwen3", "llama")],
)
def test_an_adapter_for_another_architecture(folder, architecture, message):
    model = zoo.make(architecture)
    before = State.of(model)
    with pytest.raises(fw.ForewordError, match=message) as error:
        fw.load(model, folder)
    assert is_one_line(error.value)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    "size",
    [{"hidden_size": 64}, {"num_key_value_heads": 4}, {"num_hidden_layers": 4}, {"head_dim": 16}],
    ids=lambda size: next(iter(size)),
)
def test_an_adapter_for_other_shapes(folder, size):
    config = zoo.make("llama").config.to_dict() | {"head_dim": None} | size
    model = zoo.hf.LlamaForCausalLM(zoo.hf.LlamaConfig(**config))
    before = State.of(model)
    with pytest.raises(fw.ForewordError, match=str(folder)) as error:
        fw.load(model, folder)
    assert is_one_line(error.value)
    assert_unchanged(model, before)


def test_a_name_that_is_taken(folder, model):
    fw.load(model, folder)
    expected = model(text()).logits
    with pytest.raises(fw.ForewordError, match="'default' already"):
        fw.load(model, folder)
    assert torch.equal(model(text()).logits, expected)


@pytest.mark.parametrize("path", ["./nothing", "/nothing", "~/nothing", "nothing", "a/b/c"])
def test_a_path_that_is_nothing(model, path):
    """None of these could be a Hub id, so no Hub is asked."""
    with pytest.raises(fw.ForewordError, match="is not an adapter folder"):
        fw.load(model, path)
    assert fw.adapters(model) == []


def test_nothing_of_the_file_is_executed(folder, model):
    """A pickle under the name of the weights is damage, not code."""
    weights_of(folder).write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    with pytest.raises(fw.ForewordError, match="damaged"):
        fw.load(model, folder)
    assert not Path("executed").exists()
