"""A cartridge in a plain KV cache: the base computes with it what it computes with the adapter."""

import copy

import pytest
import torch
from safetensors import safe_open
from transformers import DynamicCache

import foreword as fw
import tiny
import zoo
from conformance import shake
from foreword.cli import main
from foreword.convert import export_adapter, import_adapter
from foreword.convert.kv_cache import FILE, to_cache

LENGTH = 5
ARCHITECTURES = ["llama", "qwen3-wide-heads", "phi3", "gpt_neox", "gpt2", "opt"]


def ids() -> torch.Tensor:
    return torch.randint(3, zoo.VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(4))


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_untrained_it_is_what_a_prefill_leaves(architecture):
    model = zoo.make(architecture)
    context = ids()[:, :LENGTH]
    expected = DynamicCache(config=model.config)
    model(context, cache=expected)
    actual = to_cache(fw.attach(model, fw.Cartridge(LENGTH), init_ids=context))
    assert actual.get_seq_length() == LENGTH
    for ours, theirs in zip(actual.layers, expected.layers, strict=True):
        near(ours.keys, theirs.keys)
        near(ours.values, theirs.values)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_base_reads_it_as_it_reads_the_adapter(architecture):
    model = zoo.make(architecture)
    adapter = fw.attach(model, fw.Cartridge(LENGTH))
    shake(adapter)
    expected = model(ids()).logits
    cache = to_cache(adapter)
    fw.detach(model, "default")
    near(model(ids(), cache=copy.deepcopy(cache)).logits, expected)
    steps = [model(token[:, None], cache=cache).logits for token in ids().T]
    near(torch.cat(steps, dim=1), expected)


@torch.no_grad()
def test_joined_cartridges_are_one_cache():
    model = zoo.make("llama")
    for seed, name in enumerate(("rome", "greece")):
        shake(fw.attach(model, fw.Cartridge(LENGTH + seed), name=name, seed=seed), seed=seed)
    joined = fw.join(model, ["rome", "greece"], "both")
    expected = model(ids()).logits
    cache = to_cache(joined)
    assert cache.get_seq_length() == 2 * LENGTH + 1
    fw.set_active(model, None)
    near(model(ids(), cache=cache).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gptj", "gemma2"])
def test_a_file_comes_back_as_a_cartridge(architecture, tmp_path):
    model = zoo.make(architecture)
    adapter = fw.attach(model, fw.Cartridge(LENGTH, frozen_tokens=2))
    shake(adapter)
    expected = model(ids()).logits
    if architecture == "gemma2":
        with pytest.warns(UserWarning, match="leaves the sliding window"):
            export_adapter(adapter, tmp_path, "kv-cache")
    else:
        export_adapter(adapter, tmp_path, "kv-cache")
    with safe_open(tmp_path / FILE, framework="pt") as file:
        assert file.metadata()["length"] == str(LENGTH)
        assert file.get_tensor("key.0").shape[:3] == (1, file.get_tensor("key.0").shape[1], LENGTH)
    other = zoo.make(architecture)
    back = import_adapter(other, tmp_path)
    assert back.methods == [fw.Cartridge(LENGTH, frozen_tokens=2)]
    near(other(ids()).logits, expected)


def test_a_prefix_tuned_adapter_can_be_written_too(tmp_path):
    model = zoo.make("llama")
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH, reparam="shared", hidden=8))
    shake(adapter)
    export_adapter(adapter, tmp_path, "kv-cache")
    other = zoo.make("llama")
    import_adapter(other, tmp_path / FILE)
    with torch.no_grad():
        near(other(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize(
    ("architecture", "method", "reason"),
    [
        ("llama", fw.ZeroInit(length=4), "zero-init is more, or less"),
        ("llama", fw.PrefixTuning(length=4, layers=2), "prefix-tuning is more, or less"),
        ("t5", fw.PrefixTuning(length=4), "of a decoder"),
        ("deepseek_v3", fw.Cartridge(4), "something else in its cache"),
        ("lfm2", fw.Cartridge(4), "keeps more than keys and values"),
        ("mistral-window", fw.Cartridge(4), "sliding window"),
    ],
)
def test_what_a_cache_can_not_hold(architecture, method, reason):
    with pytest.raises(fw.ForewordError, match=reason):
        to_cache(fw.attach(zoo.make(architecture), method))


def test_a_cache_of_another_model_is_refused(tmp_path):
    export_adapter(fw.attach(zoo.make("llama"), fw.Cartridge(4)), tmp_path, "kv-cache")
    model = zoo.make("qwen3-wide-heads")
    with pytest.raises(fw.ForewordError, match=r"key.0 is .* expected \[1, 2, 4, 16\]"):
        import_adapter(model, tmp_path)
    assert not hasattr(model, "foreword")


def test_on_the_command_line(tmp_path, capsys):
    base = tiny.save(tmp_path / "base")
    model, _ = fw.base(base)
    fw.attach(model, fw.Cartridge(4)).save(tmp_path / "cartridge")
    words = ["convert", tmp_path / "cartridge", "--to", "kv-cache", "--output", tmp_path / "cache"]
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    words = ["convert", tmp_path / "cache", "--model", base, "--output", tmp_path / "back"]
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    assert fw.load(fw.base(base)[0], tmp_path / "back").methods == [fw.Cartridge(4)]
