"""Layers below the adapter run once for each example, and training is what it is without that."""

import pytest
import torch
from torch import nn

import foreword as fw
import tiny
import zoo
from foreword.errors import ForewordError
from foreword.frozen import FrozenLayers
from foreword.train import train
from test_train import data, settings

MEGABYTE = 1 << 20


def calls_of(module: nn.Module) -> list[int]:
    """A list that grows by the batch size of every call that computes `module`."""
    calls: list[int] = []
    module.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    return calls


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox", "opt", "qwen3", "mixtral"])
def test_a_batch_that_was_seen_skips_the_layers_below(architecture):
    model = zoo.make(architecture)
    adapter = fw.attach(model, fw.ZeroInit(length=3, layers=1))
    frozen = FrozenLayers(adapter, MEGABYTE)
    assert frozen.number == len(adapter.host.layout.layers) - 1
    calls = calls_of(adapter.host.layout.ffns[0].module)
    ids = torch.randint(3, zoo.VOCABULARY, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[1, :4] = 0  # padding right and left
    expected = model(ids, attention_mask=mask).logits
    calls.clear()
    with frozen.remember():
        first = model(ids, attention_mask=mask).logits
        again = model(ids, attention_mask=mask).logits
        wider = model(nn.functional.pad(ids[2:], (2, 0)), attention_mask=nn.functional.pad(mask[2:], (2, 0))).logits
    assert len(calls) == 1
    torch.testing.assert_close(first[mask.bool()], expected[mask.bool()])
    torch.testing.assert_close(again[mask.bool()], expected[mask.bool()])
    torch.testing.assert_close(wider[0, 2:], expected[2])
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])


def test_nothing_below_the_lowest_adapted_layer_is_differentiated():
    model = zoo.make("llama")
    adapter = fw.attach(model, fw.PrefixTuning(length=3, layers=1))
    seen = []
    for path in adapter.host.layout.layers:
        model.get_submodule(path).register_forward_hook(lambda *call: seen.append(call[-1].requires_grad))
    model.train()(torch.randint(3, zoo.VOCABULARY, (2, 5)))
    assert seen == [False] * (len(seen) - 1) + [True]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_ends_as_without_it(checkpointing, tmp_path):
    trained = []
    for gigabytes in (0.0, 0.01):
        model = tiny.model()
        calls = calls_of(model.model.layers[0].mlp)
        method = fw.PrefixTuning(length=4, layers=2, init="normal")
        options = settings(
            tmp_path / str(gigabytes), save_strategy="no", cache_frozen=gigabytes, gradient_checkpointing=checkpointing
        )
        result = train(model, tiny.tokenizer(), method, data(), options)  # 24 examples, 12 steps of 4: two epochs
        trained.append((result.adapter.state_dict(), len(calls)))
    (expected, every), (kept, some) = trained
    assert some < every
    for name, tensor in expected.items():
        torch.testing.assert_close(kept[name], tensor, atol=1e-4, rtol=1e-4)


def test_the_bound_holds():
    model = zoo.make("llama")
    frozen = FrozenLayers(fw.attach(model, fw.ZeroInit(length=3, layers=1)), 2 * 9 * 4 * model.config.hidden_size)
    with frozen.remember():
        model(torch.randint(3, zoo.VOCABULARY, (5, 9)))
    assert len(frozen.states) == 2
    assert frozen.num_bytes <= 2 * 9 * 4 * model.config.hidden_size


@pytest.mark.parametrize("method", ["prefix-tuning", "prompt-tuning", "full"])
def test_methods_that_change_the_lowest_layer_have_nothing_to_keep(method):
    adapter = fw.attach(zoo.make("llama"), method)
    with pytest.raises(ForewordError, match="changes the lowest layer"):
        FrozenLayers(adapter, MEGABYTE)


def test_random_layers_cannot_be_kept():
    model = zoo.make("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    with pytest.raises(ForewordError, match="random in training"):
        FrozenLayers(fw.attach(model, fw.ZeroInit(length=3, layers=1)), MEGABYTE)
