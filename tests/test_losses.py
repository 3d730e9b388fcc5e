"""The completion loss is the model's own loss, without the logits of prompts."""

import pytest
import torch

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
    loss, outputs = completion_loss(model, {"input_ids": ids, "labels": labels})
    expected = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(loss.double(), expected.double(), atol=1e-5, rtol=1e-5)
    assert outputs.logits.shape[1] <= 8


def test_makes_no_logits_of_prompts():
    model = zoo.make("llama")
    ids = torch.randint(3, zoo.VOCABULARY, (2, 12))
    labels = ids.clone()
    labels[:, :9] = IGNORED
    _, outputs = completion_loss(model, {"input_ids": ids, "labels": labels})
    assert outputs.logits.shape[1] == 3


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
