"""I12: at step 0 a cartridge is its text in the context, and what a cartridge refuses."""

import pytest
import torch
from transformers import DynamicCache

import foreword as fw
import zoo
from conformance import shake
from foreword.compress import Compression, Dialogue, init_ids

LENGTH = 6
ARCHITECTURES = ["llama", "qwen3", "gemma2", "gpt2", "opt", "gpt_neox", "deepseek_v3", "gpt_oss"]


def near(actual, expected, tolerance: float = 1e-3):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_i12_it_starts_as_its_text_in_the_context(architecture):
    model = zoo.make(architecture)
    context, ids = torch.randint(3, zoo.VOCABULARY, (1, LENGTH)), torch.randint(3, zoo.VOCABULARY, (2, 5))
    if architecture in ("gemma2", "gpt_oss"):  # their window ends before the last token sees the first
        context, ids = context[:, :2], ids[:, :4]
    expected = model(torch.cat([context.expand(2, -1), ids], 1)).logits[:, context.shape[1] :]
    adapter = fw.attach(model, fw.Cartridge(context.shape[1]), init_ids=context)
    near(model(ids).logits, expected)
    cache = DynamicCache(config=model.config)
    steps = [model(token[:, None], cache=cache).logits for token in ids.T]
    near(torch.cat(steps, dim=1), expected)
    shake(adapter)
    assert (model(ids).logits - expected).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.smollm2
def test_i12_on_smollm2_with_a_document_in_a_system_message():
    model, tokenizer = fw.base("smollm2")
    dialogue = Dialogue(tokenizer)
    document = dialogue.encode("The lighthouse of Brenn was built in 1731, and its keeper was called Ansa.")
    frame = len(dialogue.head) + len(dialogue.tail)
    start = init_ids(model, dialogue, document, Compression(length=len(document) + frame))
    messages = [{"role": "system", "content": tokenizer.decode(document)}]
    assert start == tokenizer.apply_chat_template(messages, return_dict=False)
    question = torch.tensor([dialogue.ids(dialogue.prompt("Who kept the lighthouse?"))])
    expected = model(torch.cat([torch.tensor([start]), question], 1)).logits[:, len(start) :]
    fw.attach(model, fw.Cartridge(len(start)), init_ids=start)
    near(model(question).logits, expected, tolerance=1e-2)  # of logits that reach 30, in fp32


def test_only_the_sink_stays():
    model = zoo.make("llama")
    adapter = fw.attach(model, fw.Cartridge(LENGTH), init_ids=range(3, 3 + LENGTH))
    before = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    model(torch.tensor([[5, 6, 7]])).logits.pow(2).mean().backward()
    torch.optim.SGD(adapter.trainable_parameters, lr=1.0).step()
    for name, tensor in adapter.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("frozen" in name), name
        assert tensor.shape[1] == (1 if "frozen" in name else LENGTH - 1)


@pytest.mark.parametrize("architecture", ["t5", "bart", "bert"])
def test_it_stands_before_causal_text_only(architecture):
    with pytest.raises(fw.ForewordError, match="causal decoder"):
        fw.attach(zoo.make(architecture), fw.Cartridge(LENGTH))


def test_more_frozen_tokens_than_tokens_are_refused():
    with pytest.raises(fw.ForewordError, match="frozen_tokens must be from 0 to length"):
        fw.Cartridge(4, frozen_tokens=5)
