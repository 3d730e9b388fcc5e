"""A prefix beside the KV cache and beside other rows: I7, I22."""

import pytest
import torch
from naive import exactly, key_values, prompts, random_ids
from transformers import DynamicCache

import foreword as fw
from conformance import shake

LENGTH, TEXT = 5, 9
METHODS = {
    "prefix-tuning": fw.PrefixTuning(length=LENGTH),
    "prefix-tuning mlp": fw.PrefixTuning(length=LENGTH, reparam="shared", hidden=16),
    "deep-prompt": fw.DeepPrompt(length=LENGTH),
    "prompt-tuning": fw.PromptTuning(length=LENGTH),
    "zero-init": fw.ZeroInit(length=LENGTH, layers=3, opening=0.5),
    "zero-init-nonlinear": fw.ZeroInitNonlinear(length=LENGTH, layers=3),
    "random-init": fw.RandomInit(length=LENGTH, layers=3),
}


def decode(model, ids, split):
    """Logits of a prefill of `split` tokens and then one token at a time; the cache holds the text and nothing else."""
    cache = DynamicCache()
    parts = [model(ids[:, :split], past_key_values=cache).logits]
    for at in range(split, ids.shape[1]):
        assert cache.get_seq_length() == at
        parts.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
    assert all(layer.keys.shape[-2] == ids.shape[1] for layer in cache.layers)
    return torch.cat(parts, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("split", [1, 5])
def test_i7_decoding_with_a_cache_is_the_whole_forward(model, ids, method, split):
    shake(fw.attach(model, METHODS[method]))
    exactly(decode(model, ids, split), model(ids).logits)


@pytest.mark.parametrize("method", METHODS)
def test_i7_with_gradients_on(model, ids, method):
    shake(fw.attach(model, METHODS[method]))
    exactly(decode(model, ids, 5), model(ids).logits)


@torch.no_grad()
def test_i7_against_the_naive_decoder(model, decoder, ids):
    adapter = fw.attach(model, METHODS["prefix-tuning"])
    shake(adapter)
    exactly(decode(model, ids, 5), decoder(ids, key_values=key_values(adapter)))
    fw.detach(model, "default")
    adapter = fw.attach(model, METHODS["zero-init"])
    shake(adapter)
    exactly(decode(model, ids, 5), decoder(ids, prompts=prompts(adapter)))


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_i22_a_batch_is_its_rows(model, method):
    ids = random_ids(batch=3)
    shake(fw.attach(model, METHODS[method]))
    rows = [model(row[None]).logits for row in ids]
    exactly(model(ids).logits, torch.cat(rows))
