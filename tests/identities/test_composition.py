"""Several methods in one adapter: each adds its own term."""

import pytest
import torch
from naive import LAYERS, exactly

import foreword as fw
from conformance import shake


@torch.no_grad()
@pytest.mark.parametrize("order", [1, -1])
def test_a_prefix_and_a_gated_prompt(model, decoder, ids, order):
    """One softmax over [prefix; text], then the gated term, in whichever order they were named."""
    methods = [fw.PrefixTuning(length=3), fw.ZeroInit(length=4, layers=2, opening=0.2)][::order]
    adapter = fw.attach(model, methods)
    shake(adapter)
    state = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    prefix, gated = (0, 1)[::order]
    pairs = [tuple(state[f"{prefix}.self.{i}.source.{part}"] for part in ("key", "value")) for i in range(LAYERS)]
    prompts = [
        (state[f"{gated}.self.{i}.source.prompt"], torch.tanh(state[f"{gated}.self.{i}.combine.gate"]))
        if i >= LAYERS - 2
        else None
        for i in range(LAYERS)
    ]
    exactly(model(ids).logits, decoder(ids, key_values=pairs, prompts=prompts))


@torch.no_grad()
def test_two_prefixes_are_one(model, decoder, ids):
    """Two joint prefixes stand side by side in the softmax."""
    adapter = fw.attach(model, [fw.PrefixTuning(length=2), fw.PrefixTuning(length=3)])
    shake(adapter)
    state = adapter.state_dict()
    pairs = [
        tuple(torch.cat([state[f"{n}.self.{i}.source.{part}"] for n in (0, 1)], dim=1) for part in ("key", "value"))
        for i in range(LAYERS)
    ]
    exactly(model(ids).logits, decoder(ids, key_values=pairs))
