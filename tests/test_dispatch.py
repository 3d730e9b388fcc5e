"""The wrapper stays in the way of every attention call, whatever happens to the model or the registry."""

import pytest
import torch
from transformers import AttentionInterface

import foreword as fw
import zoo


@pytest.fixture
def ids():
    return torch.randint(3, zoo.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_an_implementation_switched_after_attaching_reads_the_adapter(ids):
    model = zoo.make("llama")
    fw.attach(model, fw.PrefixTuning(length=4))
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_function_registered_anew_reads_the_adapter(ids):
    """Another library puts its own function under a known name, as kernels do."""
    model = zoo.make("llama")
    fw.attach(model, fw.ZeroInit(length=4, opening=0.5))
    expected = model(ids).logits
    inner, calls = AttentionInterface._global_mapping["sdpa"], []

    def other(*args, **kwargs):
        calls.append("foreword" in kwargs)
        kwargs.pop("foreword", None)
        return inner(*args, **kwargs)

    AttentionInterface.register("sdpa", other)
    try:
        torch.testing.assert_close(model(ids).logits, expected)
    finally:
        AttentionInterface.register("sdpa", inner)
    assert calls
    assert not any(calls)
    torch.testing.assert_close(model(ids).logits, expected)


@torch.no_grad()
def test_a_model_without_adapters_takes_the_original(ids):
    adapted, plain = zoo.make("llama"), zoo.make("llama")
    expected = plain(ids).logits
    fw.attach(adapted, "prefix-tuning")
    assert torch.equal(plain(ids).logits, expected)
