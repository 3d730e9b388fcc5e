"""Adapters on the residual stream and the output head, other activations, and prefixes whose text counts otherwise."""

import pytest
import torch
from torch.nn.functional import silu

import conformance
import foreword as fw
import zoo
from conformance import shake, text

METHODS = {
    "parallel": fw.ParallelAdapter(16, reads="residual", activation="silu"),
    "sequential": fw.SequentialAdapter(16, reads="residual", activation="gelu"),
    "head": fw.LlamaAdapterV2(length=2, head=True),
    "own positions": fw.Point(fw.sources.Direct(4), fw.combines.Joint(), text_positions="own"),
}
CELLS = [("llama", "parallel"), ("llama", "sequential"), ("gpt2", "own positions"), ("t5", "parallel")]
CELLS += [("llama", "head"), ("gpt2", "head"), ("t5", "head"), ("bert", "head")]


@pytest.mark.parametrize("check", conformance.CHECKS)
@pytest.mark.parametrize(("architecture", "name"), CELLS)
def test_conformance(architecture, name, check):
    if name == "own positions" and check == "stands for text":
        pytest.skip("its text does not follow it")
    case = conformance.make_case(architecture, METHODS[name])
    try:
        conformance.CHECKS[check](case)
    except conformance.NotApplicable as reason:
        pytest.skip(str(reason))


@torch.no_grad()
@pytest.mark.parametrize("name", ["parallel", "sequential"])
def test_what_they_read(name):
    """x' + h + s·A(x') and x' + h + A(x' + h), with x' the stream in front of the FFN's norm and h the FFN's output."""
    model = zoo.make("llama")
    adapter = fw.attach(model, [METHODS[name], fw.ParallelAdapter(4)])  # beside one that reads the norm's output
    shake(adapter)
    expected = model(text()).logits
    fw.set_active(model, None)
    stream, normalised = {}, {}
    for index, layer in enumerate(model.model.layers):
        first, second = (adapter.parts[part] for part in (0, 1))
        own, other = (list(part.modules.values())[index].adapter for part in (first, second))

        def hook(module, args, out, layer=layer, own=own, other=other):
            x = stream[layer]
            out = out + 4 * torch.relu(normalised[layer] @ other.down.T) @ other.up.T
            if name == "parallel":
                return out + 4 * silu(x @ own.down.T) @ own.up.T
            inner = torch.nn.functional.gelu((x + out) @ own.down.T + own.down_bias)
            return out + inner @ own.up.T + own.up_bias

        norm = layer.post_attention_layernorm
        norm.register_forward_pre_hook(lambda m, args, layer=layer: stream.__setitem__(layer, args[0]))
        norm.register_forward_hook(lambda m, args, out, layer=layer: normalised.__setitem__(layer, out))
        layer.mlp.register_forward_hook(hook)
    torch.testing.assert_close(model(text()).logits, expected, atol=1e-4, rtol=1e-4)


def test_where_they_have_no_place():
    with pytest.raises(fw.ForewordError, match="has no table of positions"):
        fw.attach(zoo.make("llama"), fw.Point(fw.sources.Direct(4), fw.combines.Joint(), text_positions="after"))
    with pytest.raises(fw.ForewordError, match="activation must be one of"):
        fw.ParallelAdapter(activation="elu")
    post_norm = fw.attach(zoo.make("bert"), fw.ParallelAdapter(4, reads="residual"))  # there the FFN reads the stream
    assert {place.kind for place in post_norm.parts[0].modules} == {"ffn"}


def test_the_head_learns_by_the_loss_of_training():
    """The loss by chunks reads the head alone, so that a head with an adapter goes by columns."""
    from foreword.losses import completion_loss

    model = zoo.make("llama")
    adapter = fw.attach(model, METHODS["head"])
    shake(adapter, std=0.1)
    ids = text()
    labels = ids.clone()
    labels[:, :3] = -100
    expected = model(input_ids=ids, labels=labels).loss
    gradients = torch.autograd.grad(expected, adapter.trainable_parameters, allow_unused=True)
    loss, _ = completion_loss(model, {"input_ids": ids, "labels": labels})
    torch.testing.assert_close(loss, expected)
    for one, other in zip(
        torch.autograd.grad(loss, adapter.trainable_parameters, allow_unused=True), gradients, strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_stack_that_is_called_by_itself_leaves_nothing_behind():
    from foreword.model import frames

    model = zoo.make("llama")
    fw.attach(model, METHODS["head"])
    model.model(text())
    model(text())
    assert frames._running.frames == []
    bare = zoo.make("llama").model
    with pytest.raises(fw.ForewordError, match="no output head"):
        fw.attach(bare, METHODS["head"])
