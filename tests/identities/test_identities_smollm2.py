"""The identities on a real pretrained model, in float32: I2, I7, I8, I11, I12, I22; and where training begins."""

import pytest
import torch
from transformers import DynamicCache

import foreword as fw
from conformance import shake

pytestmark = pytest.mark.smollm2
TOLERANCE = 1e-2  # of logits that reach 30, after 30 layers in float32
METHODS = {
    "prefix-tuning": fw.PrefixTuning(length=6),
    "zero-init": fw.ZeroInit(length=6, layers=28, opening=0.2),
}


@pytest.fixture(scope="session")
def smollm2():
    return fw.base("smollm2")


@pytest.fixture
def model(smollm2):
    model, _ = smollm2
    yield model
    for name in fw.adapters(model):
        fw.detach(model, name)


@pytest.fixture
def ids(smollm2):
    _, tokenizer = smollm2
    texts = ["The river was cold, and the boat went on without", "A list of three fruits: apples, plums and then there"]
    rows = [tokenizer(text).input_ids for text in texts]
    width = min(map(len, rows))
    return torch.tensor([row[:width] for row in rows])


def near(actual, expected):
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("method", [fw.ZeroInit(), fw.ZeroInitNonlinear()], ids=["linear", "nonlinear"])
def test_i2_zero_init_starts_at_the_base(model, ids, method):
    base = model(ids).logits
    fw.attach(model, method)
    assert torch.equal(model(ids).logits, base)
    fw.detach(model, "default")
    assert torch.equal(model(ids).logits, base)


@torch.no_grad()
@pytest.mark.parametrize("method", sorted(fw.methods()))
@pytest.mark.parametrize("start", ["a text", "random tokens"])
def test_training_begins_near_the_base(model, smollm2, ids, method, start):
    """At its defaults no method starts far above the frozen loss, but for the papers' baseline of random prompts."""
    _, tokenizer = smollm2
    init_ids = tokenizer("The committee met on Tuesday to discuss the budget. " * 20).input_ids
    base = model(ids, labels=ids).loss
    try:
        fw.attach(model, method, init_ids=init_ids if start == "a text" else None)
    except fw.ForewordError as refusal:
        pytest.skip(str(refusal))
    above = model(ids, labels=ids).loss - base
    if method == "random-init":
        assert above > 5
    else:
        assert above < (1 if start == "a text" else 2)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_i7_i8_i22_cache_padding_and_batch(model, ids, method):
    shake(fw.attach(model, METHODS[method]), std=0.1)
    batch = model(ids).logits
    near(torch.cat([model(row[None]).logits for row in ids]), batch)  # I22

    cache = DynamicCache()
    split = ids.shape[1] - 2
    parts = [model(ids[:, :split], past_key_values=cache).logits]
    parts += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in (split, split + 1)]
    assert cache.get_seq_length() == ids.shape[1]
    near(torch.cat(parts, dim=1), batch)  # I7

    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    padded = model(ids, attention_mask=mask).logits
    near(padded[0], batch[0])
    near(padded[1, 4:], model(ids[1:, 4:]).logits[0])  # I8


@torch.no_grad()
def test_i8_pads_that_count_move_the_logits(model, ids):
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    columns = torch.arange(ids.shape[1])[None]
    near(model(ids, attention_mask=mask, position_ids=columns).logits[:, 4:], model(ids[:, 4:]).logits)  # the base
    shake(fw.attach(model, METHODS["prefix-tuning"]), std=0.1)
    counted = model(ids, attention_mask=mask, position_ids=columns).logits[:, 4:]
    assert (counted - model(ids[:, 4:]).logits).abs().max() > 0.1


@torch.no_grad()
def test_i11_prompt_tuning_is_the_prompt_in_front(model, ids):
    adapter = fw.attach(model, fw.PromptTuning(length=6))
    shake(adapter, std=0.05)
    logits = model(ids).logits
    (prompt,) = adapter.state_dict().values()
    fw.set_active(model, None)
    embeddings = torch.cat([prompt.expand(len(ids), -1, -1), model.get_input_embeddings()(ids)], dim=1)
    near(logits, model(inputs_embeds=embeddings).logits[:, 6:])


@torch.no_grad()
def test_i12_started_from_text_it_is_the_text_in_the_context(model, ids, smollm2):
    _, tokenizer = smollm2
    context = torch.tensor([tokenizer("Once upon a time there lived an old").input_ids])
    length = context.shape[1]
    expected = model(torch.cat([context.expand(len(ids), -1), ids], dim=1)).logits[:, length:]
    for method in (fw.PrefixTuning(length=length), fw.DeepPrompt(length=length)):
        fw.attach(model, method, init_ids=context)
        near(model(ids).logits, expected)
        fw.detach(model, "default")
