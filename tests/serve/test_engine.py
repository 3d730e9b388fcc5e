"""The engine: each request reads its own adapter, by continuous batching where it can and by generate elsewhere."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch

import foreword as fw
import zoo
from conformance import shake, small
from foreword.serve.engine import Engine
from foreword.serve.jobs import Busy, Closing, Decoding, Failed, Refused
from foreword.serve.limits import Limits
from foreword.serve.paged import obstacle_to_paging

NEW = 8
SEEDS = 6
SMALL = {"max_batch": 8, "max_batch_tokens": 16, "cache_tokens": 1024, "context": 100}  # prompts are read in parts
PAGED = ["llama", "mistral-window", "qwen3", "gemma3", "phi3", "gpt2", "mixtral"]
PLAIN = ["gemma2", "gpt_neox", "opt", "gpt_oss", "lfm2", "bart", "t5"]
METHODS = ["prefix-tuning", "zero-init", "multihead-adapter"]


def prompt(seed):
    length = 4 + seed * 3 % 20
    return torch.randint(3, zoo.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model, ids, new=NEW):
    """What the active adapter answers."""
    row = torch.tensor([ids])
    out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=new, do_sample=False)[0]
    return out[1:].tolist() if model.config.is_encoder_decoder else out[len(ids) :].tolist()


def adapters(model, folder, methods):
    """Saved adapters m<i>, and the answers of each, and of the base, to the prompts 0 …."""
    answers = {None: [alone(model, prompt(seed)) for seed in range(SEEDS)]}
    for number, method in enumerate(methods):
        name = f"m{number}"
        adapter = fw.attach(model, small(method), name=name, seed=number)
        shake(adapter, seed=number, std=1.0)
        adapter.save(folder / name)
        answers[name] = [alone(model, prompt(seed)) for seed in range(SEEDS)]
        fw.detach(model, name)
    return answers


async def collect(engine, ids, name, **decoding):
    return [token.id async for token in engine.generate(ids, Decoding(**{"max_tokens": NEW, **decoding}), name)]


def using(model, folder, use, **limits):
    """Run `use(engine)` with the adapters of `folder`."""

    async def main():
        engine = Engine(model, Limits(**SMALL | limits))
        engine.store.scan(folder)
        try:
            return await asyncio.wait_for(use(engine), 120)
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("architecture", PAGED + PLAIN)
def test_a_mixed_crowd_gets_its_own_answers(architecture, tmp_path):
    """Prompts longer than a forward, several adapters and the base at once."""
    model = zoo.make(architecture)
    methods = METHODS[:2] if architecture in ("bart", "t5") else METHODS
    answers = adapters(model, tmp_path, methods)
    crowd = [(name, seed) for seed in range(SEEDS) for name in answers]

    async def use(engine):
        assert (engine.obstacle is None) == (architecture in PAGED)
        return await asyncio.gather(*(collect(engine, prompt(seed), name) for name, seed in crowd))

    got = using(model, tmp_path, use)
    for (name, seed), answer in zip(crowd, got, strict=True):
        assert answer == answers[name][seed], (name, seed)


def test_methods_outside_of_the_attention_run_through_generate_and_the_log_says_so(tmp_path, caplog):
    model = zoo.make("llama")
    answers = adapters(model, tmp_path, ["parallel-adapter", "prefix-tuning"])

    async def use(engine):
        return await asyncio.gather(*(collect(engine, prompt(seed), "m0") for seed in range(4)))

    with caplog.at_level(logging.WARNING, "foreword.serve"):
        assert using(model, tmp_path, use) == answers["m0"][:4]
    assert caplog.messages == [
        "requests run through generate rather than continuous batching: parallel-adapter acts outside of the attention"
    ]


def test_a_model_that_can_not_be_packed_is_named_in_the_log(caplog, tmp_path):
    async def use(engine):
        return engine.obstacle

    with caplog.at_level(logging.WARNING, "foreword.serve"):
        assert using(zoo.make("gemma2"), tmp_path, use) in caplog.text
    assert "its attention is 'eager'" in caplog.text


def test_packing_may_choose_between_equal_tokens_and_no_others(monkeypatch):
    model = zoo.make("llama")
    head = model.get_output_embeddings().weight.data
    head[1] = head[0]  # two tokens of equal logits, the highest of all with this bias
    model.get_output_embeddings().bias = torch.nn.Parameter(
        torch.zeros(len(head)).index_fill_(0, torch.arange(2), 100.0)
    )

    def says(tokens):
        packed = {name: SimpleNamespace(generated_tokens=tokens, error=None) for name in "ab"}
        monkeypatch.setattr(model, "generate_batch", lambda prompts, **settings: packed)
        return obstacle_to_paging(model)

    assert says([0] * 8) is None
    assert says([0, 1] * 4) is None
    assert "answers [0, 0, 0, 0, 0, 0, 0, 2] where the model says [0, 0, 0, 0, 0, 0, 0, 0]" in says([0] * 7 + [2])


def test_the_model_is_left_as_it_was(tmp_path):
    model = zoo.make("llama")
    answers = adapters(model, tmp_path, ["prefix-tuning"])

    async def use(engine):
        await collect(engine, prompt(0), "m0")

    using(model, tmp_path, use)
    for name in fw.adapters(model):
        fw.detach(model, name)
    assert alone(model, prompt(0)) == answers[None][0]


def test_one_failing_adapter_fails_alone(tmp_path):
    """An adapter that raises an error in a forward ends its own request; the others of the batch go on."""
    model = zoo.make("llama")
    answers = adapters(model, tmp_path, ["prefix-tuning", "zero-init"])

    async def use(engine):
        bad = engine.store.lease("m1")
        for part in bad.adapter.parts:
            for prefix in part.modules.values():
                prefix.source.forward = None
        crowd = [("m0", 1), ("m1", 2), (None, 3), ("m0", 4), ("m1", 5)]
        got = await asyncio.gather(
            *(collect(engine, prompt(seed), name) for name, seed in crowd), return_exceptions=True
        )
        again = await collect(engine, prompt(0), "m0")  # and continuous batching runs again
        return crowd, got, again

    crowd, got, again = using(model, tmp_path, use)
    for (name, seed), answer in zip(crowd, got, strict=True):
        if name == "m1":
            assert isinstance(answer, Failed)
        else:
            assert answer == answers[name][seed]
    assert again == answers["m0"][0]


def test_requests_that_can_not_fit_are_refused(tmp_path):
    async def use(engine):
        with pytest.raises(Refused, match="empty"):
            await collect(engine, [], None)
        with pytest.raises(Refused, match="100 fit"):
            await collect(engine, [3] * 99, None)
        with pytest.raises(ValueError, match="no adapter 'x'"):
            await collect(engine, [3], "x")
        assert engine.waiting == 0
        assert not engine.running
        return await collect(engine, prompt(0), None)

    model = zoo.make("llama")
    assert using(model, tmp_path, use) == alone(model, prompt(0))


def test_a_prefix_in_front_counts_where_positions_are_embedded(tmp_path):
    model = zoo.make("gpt2")
    adapters(model, tmp_path, ["prefix-tuning"])

    async def use(engine):
        with pytest.raises(Refused, match="prefix of 4"):
            await collect(engine, [3] * 90, "m0", max_tokens=10)
        return await collect(engine, [3] * 86, "m0", max_tokens=10)

    assert len(using(model, tmp_path, use)) == 10


def test_the_queue_is_bounded(tmp_path):
    async def use(engine):
        running = [asyncio.ensure_future(collect(engine, prompt(n), None, max_tokens=60)) for n in range(4)]
        await asyncio.sleep(0.05)
        assert (engine.waiting, len(engine.running)) == (2, 2)
        with pytest.raises(Busy) as full:
            await collect(engine, prompt(0), None)
        assert full.value.retry_after >= 1
        answers = await asyncio.gather(*running)
        assert [len(answer) for answer in answers] == [60] * 4

    using(zoo.make("llama"), tmp_path, use, max_batch=2, max_queue=2)


def test_a_tight_budget_makes_requests_wait_their_turn(tmp_path):
    """Room for one adapter: requests for three others finish one after the other, none is passed over."""
    model = zoo.make("llama")
    answers = adapters(model, tmp_path, ["prefix-tuning"] * 3)

    async def use(engine):
        engine.store.resident_bytes = engine.store.get("m0").size
        crowd = [(f"m{number % 3}", number % SEEDS) for number in range(12)]
        got = await asyncio.gather(*(collect(engine, prompt(seed), name) for name, seed in crowd))
        assert len(engine.store.resident()) == 1
        return crowd, got

    crowd, got = using(model, tmp_path, use)
    assert got == [answers[name][seed] for name, seed in crowd]


@pytest.mark.parametrize("method", ["prefix-tuning", "parallel-adapter"])
def test_a_cancelled_request_gives_everything_back(tmp_path, method):
    model = zoo.make("llama")
    adapters(model, tmp_path, [method])

    async def use(engine):
        stream = engine.generate(prompt(1), Decoding(max_tokens=90), "m0")
        await anext(stream)
        await stream.aclose()
        tasks = [asyncio.ensure_future(collect(engine, prompt(2), "m0", max_tokens=80)) for _ in range(12)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.store.unregister("m0")
        for _ in range(500):
            await asyncio.sleep(0.01)
            if not fw.adapters(model):
                break
        assert fw.adapters(model) == []
        assert engine.waiting == 0
        assert not engine.running
        return await collect(engine, prompt(3), None)

    assert len(using(model, tmp_path, use)) == NEW


@pytest.mark.parametrize("seconds", [0, 60])
def test_the_end_finishes_or_fails_each_request(seconds, tmp_path):
    async def use(engine):
        tasks = [asyncio.ensure_future(collect(engine, prompt(n), None, max_tokens=40)) for n in range(12)]
        await asyncio.sleep(0.05)
        await engine.drain(seconds)
        with pytest.raises(Closing):
            await collect(engine, prompt(0), None)
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = using(zoo.make("llama"), tmp_path, use)
    if seconds:
        assert [len(answer) for answer in answers] == [40] * 12
    else:
        assert all(isinstance(answer, Closing) for answer in answers)


def test_samples_have_the_models_probabilities():
    """The argmax of perturbed scores is a sample of their softmax, cut to the nucleus."""
    from foreword.serve.sampler import nucleus, perturbed

    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    generator = torch.Generator().manual_seed(0)
    decoding = Decoding(temperature=0.8, top_p=0.9)
    draws = torch.stack([perturbed(scores, decoding, generator).argmax() for _ in range(20_000)])
    expected = nucleus(scores / 0.8, 0.9).softmax(-1)
    assert (expected == 0).tolist() == [False, False, True, True, True]
    torch.testing.assert_close(torch.bincount(draws, minlength=5) / len(draws), expected, atol=0.01, rtol=0)
    assert nucleus(scores, 0.0).isfinite().tolist() == [True, False, False, False, False]
