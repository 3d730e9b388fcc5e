"""The completion loss is the model's own loss, without the logits of prompts."""

import pytest
import torch

import foreword as fw
import zoo
from foreword.losses import IGNORED, completion_loss


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "opt"])
def test_equals_the_models_own_loss(architecture):
    model = zoo.make(architecture, torch.float64)
    ids = torch.randint(3, zoo.VOCABULARY, (3, 9))
    labels = ids.clone()
    labels[0, :5] = IGNORED
    labels[1, :2] = IGNORED
    labels[2, 6:] = IGNORED
    adapter = fw.attach(model, fw.PrefixTuning(length=3, init="normal"))
    loss, outputs = completion_loss(model, {"input_ids": ids, "labels": labels})
    expected = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(loss.double(), expected.double(), atol=1e-5, rtol=1e-5)
    assert outputs.logits.shape[1] <= 8
    gradients = [torch.autograd.grad(one, adapter.trainable_parameters) for one in (loss, expected)]
    for ours, its in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, its, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(completion_loss(model, {"input_ids": ids, "labels": labels})[0], loss)


@pytest.mark.parametrize(("architecture", "columns"), [("llama", 1), ("gemma2", 3)])
def test_makes_no_logits_of_prompts(architecture, columns):
    model = zoo.make(architecture).requires_grad_(False)
    ids = torch.randint(3, zoo.VOCABULARY, (2, 12))
    labels = ids.clone()
    labels[:, :9] = IGNORED
    for _ in range(2):  # the second time it is known whether the model changes its head's output
        _, outputs = completion_loss(model, {"input_ids": ids, "labels": labels})
        assert outputs.logits.shape[1] == columns


def test_logits_exist_for_one_chunk_at_a_time(monkeypatch):
    monkeypatch.setattr("foreword.losses.CHUNK", 4)
    model = zoo.make("llama").requires_grad_(False)
    sizes = []
    model.lm_head.register_forward_hook(lambda head, args, logits: sizes.append(logits.numel() // zoo.VOCABULARY))
    ids = torch.randint(3, zoo.VOCABULARY, (2, 6))
    loss, _ = completion_loss(model, {"input_ids": ids, "labels": ids})
    assert sizes == [1, 4, 4, 2]  # one token to see what becomes of logits, then the ten learned ones
    torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss)


def test_a_trained_head_learns_from_the_models_own_logits():
    model = zoo.make("llama")
    fw.attach(model, "full")
    ids = torch.randint(3, zoo.VOCABULARY, (2, 6))
    completion_loss(model, {"input_ids": ids, "labels": ids})[0].backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_accumulated_batches_add_up():
    model = zoo.make("llama")
    ids = torch.randint(3, zoo.VOCABULARY, (4, 8))
    labels = ids.clone()
    labels[:3, :5] = IGNORED
    whole, _ = completion_loss(model, {"input_ids": ids, "labels": labels})
    items = (labels[:, 1:] != IGNORED).sum()
    halves = [
        completion_loss(model, {"input_ids": ids[s], "labels": labels[s]}, items)[0] for s in (slice(2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(halves), whole)


def test_a_batch_without_learned_tokens_is_zero():
    model = zoo.make("llama")
    ids = torch.randint(3, zoo.VOCABULARY, (2, 5))
    loss, _ = completion_loss(model, {"input_ids": ids, "labels": torch.full_like(ids, IGNORED)})
    assert loss.item() == 0
