"""A tiny model with an adapter that changes what it says, and questions in a file."""

import pytest
import torch

import foreword as fw
import tiny


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(params=[fw.ZeroInit(length=4, layers=3), fw.ParScale(streams=2, length=4)], ids=lambda one: one.name)
def adapted(request):
    """A tiny model that reads a zero-init adapter with its gates open, or parallel streams of different prefixes."""
    model = tiny.model()
    adapter = fw.attach(model, request.param)
    draw = torch.Generator().manual_seed(1)
    for parameter in adapter.trainable_parameters:
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
    return model


@pytest.fixture
def questions(tmp_path):
    """A file of choices in the shape that ARC is published in, of different lengths, with a label that is no letter."""
    rows = [
        {
            "question": f"What is {n} and {n}?",
            "choices": {"text": [f"{2 * n}", "a number", "it is hard to say" * (n % 3 + 1)], "label": ["A", "B", "3"]},
            "answerKey": "AB3"[n % 3],
        }
        for n in range(7)
    ]
    return tiny.write_jsonl(tmp_path / "questions.jsonl", rows)
