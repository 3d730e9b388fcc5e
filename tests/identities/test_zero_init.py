"""Zero-initialised attention: I2, I3, I4, I20."""

import math

import naive
import pytest
import torch
from naive import DIM, GROUPS, HEADS, LAYERS, WIDTH, differs, exactly, prompts

import foreword as fw
from conformance import shake

LENGTH, TOP = 5, 2
METHODS = {
    "zero-init": fw.ZeroInit(length=LENGTH, layers=TOP),
    "hypermodel": fw.ZeroInitNonlinear(length=LENGTH, layers=TOP),
    "deepshare": fw.ZeroInitNonlinear(length=LENGTH, layers=TOP, form="deepshare"),
}


def gates(adapter):
    return {name: p for name, p in adapter.named_parameters().items() if name.endswith("gate")}


def others(adapter):
    return {name: p for name, p in adapter.named_parameters().items() if not name.endswith("gate")}


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_i2_at_step_0_the_model_is_the_base(ids, method, dtype):
    model = naive.llama(dtype=dtype)
    base = model(ids).logits
    adapter = fw.attach(model, METHODS[method])
    assert torch.equal(model(ids).logits, base)
    shake(adapter)
    assert not torch.equal(model(ids).logits, base)


@torch.no_grad()
def test_i2_an_open_gate_acts(model, decoder, ids):
    adapter = fw.attach(model, fw.ZeroInit(length=LENGTH, layers=TOP, opening=0.3))
    differs(model(ids).logits, decoder(ids))
    exactly(model(ids).logits, decoder(ids, prompts=prompts(adapter)))


@torch.no_grad()
def test_the_equation(model, decoder, ids):
    """Every head, layer by layer, after all parameters have moved; layers below the top ones have no prompt."""
    adapter = fw.attach(model, METHODS["zero-init"])
    shake(adapter)
    assert [layer is None for layer in prompts(adapter)] == [True, True, False, False]
    assert all(gate.shape == (HEADS,) for gate in gates(adapter).values())
    exactly(model(ids).logits, decoder(ids, prompts=prompts(adapter)))


@torch.no_grad()
def test_i3_one_prompt_token_is_a_bias(model, ids):
    """With l = 1 the softmax is 1 whatever the query: head h gains tanh(g_h) v, a constant."""
    adapter = fw.attach(model, fw.ZeroInit(length=1, layers=TOP))
    shake(adapter)
    expected = model(ids).logits
    terms = prompts(adapter)
    fw.detach(model, "default")

    def constant(bias):
        return lambda module, args, output: output + bias

    for layer, term in enumerate(terms):
        if term is not None:
            prompt, factor = term
            attention = model.model.layers[layer].self_attn
            value = attention.v_proj(prompt).view(GROUPS, DIM).repeat_interleave(HEADS // GROUPS, dim=0)  # (H, D)
            attention.o_proj.register_forward_hook(constant(attention.o_proj((factor[:, None] * value).flatten())))
    exactly(model(ids).logits, expected)


@torch.no_grad()
def test_i4_the_factor_is_the_tanh_of_the_gate(model, decoder, ids):
    """A kernel without tanh reads tanh(g); the raw g would be another model."""
    adapter = fw.attach(model, METHODS["zero-init"])
    shake(adapter, std=0.8)
    logits = model(ids).logits
    exactly(logits, decoder(ids, prompts=prompts(adapter)))
    raw = [term and (term[0], torch.atanh(term[1])) for term in prompts(adapter)]
    differs(logits, decoder(ids, prompts=raw))


def test_i4_opening_is_the_factor(model):
    adapter = fw.attach(model, fw.ZeroInit(length=LENGTH, opening=0.3))
    for gate in gates(adapter).values():
        exactly(torch.tanh(gate.detach()), torch.full((HEADS,), 0.3, dtype=gate.dtype), 1e-7)


def gradients(model, method, ids):
    adapter = fw.attach(model, method)
    model(ids).logits.logsumexp(-1).mean().backward()
    return adapter


def test_i20_at_step_0_only_the_gate_moves(model, ids):
    adapter = gradients(model, METHODS["zero-init"], ids)
    assert len(gates(adapter)) == len(others(adapter)) == TOP
    assert all(gate.grad.abs().min() > 0 for gate in gates(adapter).values())
    assert all(not prompt.grad.any() for prompt in others(adapter).values())


def test_i20_then_the_prompts_move(model, ids):
    adapter = gradients(model, METHODS["zero-init"], ids)
    with torch.no_grad():
        for gate in gates(adapter).values():
            gate -= 0.1 * gate.grad
    model(ids).logits.logsumexp(-1).mean().backward()
    assert all(prompt.grad.any() for prompt in others(adapter).values())


def test_i20_hyper_fan_in_starts_near_a_saddle(ids):
    """The published non-linear form starts with prompts near 0, so the gate's first gradient is about 10⁻⁶ as well."""
    linear = gradients(naive.llama(), METHODS["zero-init"], ids)
    hyper = gradients(naive.llama(), METHODS["hypermodel"], ids)
    size = {a: torch.cat([g.grad for g in gates(a).values()]).norm().item() for a in (linear, hyper)}
    assert 0 < size[hyper] < 1e-3 * size[linear]
    assert all(not p.grad.any() for p in others(hyper).values())
    bound = 1e-3 * math.sqrt(3 / (64 * WIDTH))
    weight = others(hyper)["0.shared.up.weight"]
    assert 0.9 * bound < weight.abs().max() <= bound


def test_sizes(model):
    """Trained and stored numbers as METHODS counts them."""
    linear = fw.attach(model, METHODS["zero-init"], name="linear")
    assert linear.num_trainable == linear.num_stored == TOP * (LENGTH * WIDTH + HEADS)
    hyper = fw.attach(model, METHODS["hypermodel"], name="hyper")
    network = LAYERS * 64 + (64 * 64 + 64) + (64 * LENGTH * WIDTH + LENGTH * WIDTH)
    assert hyper.num_trainable == network + TOP * HEADS
    assert hyper.num_stored == linear.num_stored
    shared = fw.attach(model, METHODS["deepshare"], name="shared")
    assert shared.num_trainable == TOP * LENGTH * 256 + (256 * 64 + 64) + (64 * WIDTH + WIDTH) + TOP * HEADS
