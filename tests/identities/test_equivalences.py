"""What folds into what, and which prefix is which text: I10, I11, I12."""

import pytest
import torch
from naive import VOCABULARY, differs, exactly, key_values, random_ids

import foreword as fw
from conformance import shake

LENGTH = 5
FOLDABLE = {
    "shared MLP": fw.PrefixTuning(length=LENGTH, reparam="shared", hidden=16),
    "an MLP a layer": fw.PrefixTuning(length=LENGTH, reparam="per-layer", hidden=16),
    "hypermodel": fw.ZeroInitNonlinear(length=LENGTH, layers=3),
    "deepshare": fw.ZeroInitNonlinear(length=LENGTH, layers=3, form="deepshare"),
}


@torch.no_grad()
@pytest.mark.parametrize("method", FOLDABLE)
def test_i10_folding_changes_no_output(model, ids, method):
    """Bit for bit in the same dtype; afterwards as many numbers as `num_stored` said, all of them trainable."""
    adapter = fw.attach(model, FOLDABLE[method])
    shake(adapter)
    logits, stored, trained = model(ids).logits, adapter.num_stored, adapter.num_trainable
    assert adapter.fold() is adapter
    assert torch.equal(model(ids).logits, logits)
    assert adapter.num_stored == adapter.num_trainable == stored < trained


@torch.no_grad()
def test_i10_a_folded_mlp_is_a_plain_prefix(model, decoder, ids):
    adapter = fw.attach(model, FOLDABLE["shared MLP"])
    shake(adapter)
    logits = model(ids).logits
    exactly(logits, decoder(ids, key_values=key_values(adapter.fold())))


@torch.no_grad()
def test_i10_a_mlp_starts_at_the_text(model, ids):
    """Its last layer is solved so that the map starts where free parameters would."""
    context = random_ids(1, LENGTH, seed=7)
    free = fw.attach(model, fw.PrefixTuning(length=LENGTH), init_ids=context)
    expected, pairs = model(ids).logits, key_values(free)
    mlp = fw.attach(model, FOLDABLE["shared MLP"], name="mlp", init_ids=context)
    exactly(model(ids).logits, expected, 1e-6)
    for (key, value), (free_key, free_value) in zip(key_values(mlp.fold()), pairs, strict=True):
        exactly(key, free_key, 1e-6)
        exactly(value, free_value, 1e-6)


@torch.no_grad()
def test_i11_prompt_tuning_is_the_prompt_in_front(model, decoder, ids):
    """X⁰ = [P; Emb(ids)] through the unchanged model."""
    adapter = fw.attach(model, fw.PromptTuning(length=LENGTH))
    shake(adapter)
    (prompt,) = adapter.state_dict().values()
    embeddings = torch.cat([prompt.expand(len(ids), -1, -1), model.get_input_embeddings()(ids)], dim=1)
    logits = model(ids).logits
    exactly(logits, decoder(embeddings)[:, LENGTH:])
    fw.set_active(model, None)
    exactly(logits, model(inputs_embeds=embeddings).logits[:, LENGTH:])


@torch.no_grad()
def test_i11_is_the_kv_prefix_of_one_forward_of_the_prompt(model, decoder, ids):
    adapter = fw.attach(model, fw.PromptTuning(length=LENGTH))
    shake(adapter)
    (prompt,) = adapter.state_dict().values()
    cache = []
    decoder(prompt[None], torch.arange(-LENGTH, 0), cache=cache)
    pairs = [(key[0], value[0]) for key, value in cache]
    exactly(model(ids).logits, decoder(ids, key_values=pairs))


@torch.no_grad()
@pytest.mark.parametrize("method", [fw.PrefixTuning(length=6), fw.DeepPrompt(length=6), fw.PromptTuning(length=6)])
def test_i12_started_from_text_it_is_the_text_in_the_context(model, decoder, ids, method):
    context = random_ids(1, 6, seed=8)
    fw.attach(model, method, init_ids=context)
    expected = decoder(torch.cat([context.expand(len(ids), -1), ids], dim=1))[:, 6:]
    exactly(model(ids).logits, expected)


@torch.no_grad()
def test_i12_a_kv_prefix_has_no_order(model, ids):
    """Its order is in the rotation of its keys, so its tokens may be permuted; the text's may not."""
    context = random_ids(1, 6, seed=8)
    adapter = fw.attach(model, fw.PrefixTuning(length=6), init_ids=context)
    logits = model(ids).logits
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for tensor in adapter.state_dict().values():
        tensor.copy_(tensor[:, order].clone())
    exactly(model(ids).logits, logits)
    fw.detach(model, "default")
    fw.attach(model, fw.PrefixTuning(length=6), init_ids=context[:, order])
    differs(model(ids).logits, logits)


@torch.no_grad()
def test_i12_without_a_text_it_starts_from_ordinary_tokens(model, ids):
    """A seeded draw: the same seed gives the same adapter, and its tokens are real ones."""
    logits = []
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        fw.attach(model, fw.PrefixTuning(length=6), name=name, seed=seed)
        logits.append(model(ids).logits)
    assert torch.equal(logits[0], logits[1])
    differs(logits[0], logits[2])
    prompt = fw.attach(model, fw.PromptTuning(length=6), name="d").state_dict()["0.shared.rows"]
    table = model.get_input_embeddings().weight
    assert table.shape[0] == VOCABULARY
    assert all((table == row).all(-1).any() for row in prompt)
