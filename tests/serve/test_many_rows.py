"""Many rows with an adapter each equal as many single runs: every method of the registry, and mixes."""

import pytest
import torch

import foreword as fw
import zoo
from conformance import shake, small, text
from foreword.errors import ForewordError

ROWS = 32
NEW = 5


def attach_all(model, methods):
    """An adapter r<i> of each method, with random numbers of its own; None active."""
    names = []
    for number, method in enumerate(methods):
        adapter = fw.attach(model, small(method), name=f"r{number}", seed=number)
        shake(adapter, seed=number, std=0.5)
        names.append(adapter.name)
    fw.set_active(model, None)
    return names


def one_by_one(model, names, run):
    outs = []
    for row, name in enumerate(names):
        fw.set_active(model, name)
        outs.append(run(row))
    fw.set_active(model, None)
    return torch.cat(outs)


@torch.no_grad()
def check(model, names):
    ids = text(batch=len(names))
    generate = {"max_new_tokens": NEW, "do_sample": False}
    with fw.rows(model, names):
        logits = model(ids).logits
        answers = model.generate(ids, attention_mask=torch.ones_like(ids), **generate)
    alone = one_by_one(model, names, lambda row: model(ids[row : row + 1]).logits)
    assert (logits - alone).abs().max() <= 1e-5 * alone.abs().max()
    mask = torch.ones_like(ids[:1])
    single = one_by_one(model, names, lambda row: model.generate(ids[row : row + 1], attention_mask=mask, **generate))
    assert torch.equal(answers, single)
    assert len({tuple(row) for row in (logits[:, -1] * 1e3).int().tolist()}) == len(names)  # a swapped row would show


@pytest.mark.parametrize("method", list(fw.methods()))
def test_each_method(method):
    model = zoo.make("llama")
    try:
        names = attach_all(model, [method] * ROWS)
    except ForewordError as error:
        pytest.skip(f"no adapter of it on this model: {error}")
    if not all(part.per_row for name in names for part in model.foreword.adapters[name].parts):
        with pytest.raises(ForewordError, match="rows can't mix"), fw.rows(model, names):
            pass
        return
    check(model, names)


@pytest.mark.parametrize(
    "methods",
    [
        ["prefix-tuning", "zero-init", "deep-prompt", "prompt-tuning"],
        ["prefix-tuning", "parallel-adapter", "lora", "random-init", "adapter"],
        ["unipelt", "mam", "multihead-adapter", "prefix-memory", "zero-init-nonlinear", "prefix-tuning"],
    ],
    ids="+".join,
)
def test_mixes(methods):
    model = zoo.make("llama")
    names = attach_all(model, [methods[row % len(methods)] for row in range(ROWS - 1)])
    check(model, [*names[:9], None, *names[9:]])
