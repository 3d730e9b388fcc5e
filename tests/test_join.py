"""Joined adapters: their keys side by side on one row."""

import pytest
import torch

import foreword as fw
import tiny
import zoo
from conformance import shake
from foreword.serve.engine import Engine
from foreword.serve.jobs import Decoding
from foreword.serve.limits import Limits

NAMES = ("rome", "greece")


def with_cartridges(architecture: str = "llama"):
    model = zoo.make(architecture)
    for seed, name in enumerate(NAMES):
        shake(fw.attach(model, fw.Cartridge(4 + seed), name=name, seed=seed), seed=seed)
    return model


def ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(3, zoo.VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_it_is_one_prefix_with_the_keys_of_both(architecture):
    model = with_cartridges(architecture)
    long = fw.attach(model, fw.Cartridge(9), name="long").state_dict()
    parts = [model.foreword.adapters[name].state_dict() for name in NAMES]
    for name, tensor in long.items():
        kind = name.removesuffix("key").removesuffix("value").removesuffix("frozen_")
        what = "key" if name.endswith("key") else "value"
        whole = torch.cat([part[f"{kind}{piece}{what}"] for part in parts for piece in ("frozen_", "")], dim=1)
        tensor.copy_(whole[:, :1] if "frozen" in name else whole[:, 1:])
    expected = model(ids()).logits
    fw.join(model, NAMES, "both")
    torch.testing.assert_close(model(ids()).logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_rows_may_read_one_or_both(architecture):
    model = with_cartridges(architecture)
    fw.join(model, NAMES, "both")
    names = ["rome", "both", None, "greece"]
    with fw.rows(model, names):
        together = model(ids(4)).logits
    for row, name in enumerate(names):
        fw.set_active(model, name)
        torch.testing.assert_close(together[row], model(ids(4)[row : row + 1]).logits[0], atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_it_comes_back_from_a_folder(tmp_path):
    model = with_cartridges()
    fw.join(model, NAMES, "both").save(tmp_path)
    expected = model(ids()).logits
    other = zoo.make("llama")
    fw.load(other, tmp_path)
    assert torch.equal(other(ids()).logits, expected)


def test_the_parts_are_copies():
    model = with_cartridges()
    joined = fw.join(model, NAMES, "both")
    with torch.no_grad():
        for parameter in joined.trainable_parameters:
            parameter += 1
    assert not any(
        torch.equal(a, b)
        for a in joined.trainable_parameters
        for name in NAMES
        for b in model.foreword.adapters[name].trainable_parameters
        if a.shape == b.shape
    )


def test_it_is_served(tmp_path):
    import asyncio

    model = tiny.model()
    for seed, name in enumerate(NAMES):
        shake(fw.attach(model, fw.Cartridge(4), name=name, seed=seed), seed=seed, std=0.8)
    fw.join(model, NAMES, "both").save(tmp_path / "both")
    prompt = tiny.tokenizer()("Who?").input_ids
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)[
        0, len(prompt) :
    ]
    fw.set_active(model, None)

    async def ask() -> list[int]:
        engine = Engine(model, Limits(max_batch=2, cache_tokens=256))
        engine.store.register("both", tmp_path / "both")
        said = [token.id async for token in engine.generate(prompt, Decoding(max_tokens=6), "both")]
        await engine.close()
        return said

    assert asyncio.run(ask()) == expected.tolist()


def test_what_can_not_be_joined():
    model = with_cartridges()
    with pytest.raises(fw.ForewordError, match="at least two"):
        fw.join(model, ["rome"], "both")
    with pytest.raises(fw.ForewordError, match="no adapter 'sparta'"):
        fw.join(model, ["rome", "sparta"], "both")
    fw.attach(model, fw.PrefixTuning(length=4, reparam="shared", hidden=8), name="mlp").fold()
    with pytest.raises(fw.ForewordError, match="'rome' is not folded"):
        fw.join(model, ["rome", "mlp"], "both")
    assert set(fw.adapters(model)) == {*NAMES, "mlp"}
