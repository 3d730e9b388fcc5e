"""Two hundred clients on fifty adapters, while adapters come, go and are replaced, and clients leave in mid-stream."""

import asyncio
import json
import random
import shutil

import httpx
import pytest
from harness import BASE, Alone, running, save_adapters

from foreword.serve.limits import Limits

ADAPTERS = 50
REQUESTS = 200
NEW = 10
PROMPTS = ["Hello, who", "1 + 1 =", "A longer prompt that is read in several parts, because a forward is short"]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fifty")
    names = save_adapters(folder, (["prefix-tuning", "zero-init", "deep-prompt", "prompt-tuning"] * 13)[:ADAPTERS])
    alone = Alone(folder)
    expected = {(name, prompt): alone.text(prompt, name, NEW) for name in [None, *names] for prompt in PROMPTS}
    return folder, names, expected


def test_every_adapter_has_an_answer_of_its_own(crowd):
    """So that a request which read another tenant's adapter would be seen."""
    _, names, expected = crowd
    for prompt in PROMPTS:
        assert len({expected[name, prompt] for name in names}) == ADAPTERS


def body(name, prompt, **more):
    return {"model": name or BASE, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **more}


def test_nothing_is_lost_and_nothing_crossed(crowd, tmp_path):
    folder, names, expected = crowd
    served = shutil.copytree(folder, tmp_path / "served")
    dice = random.Random(0)

    limits = Limits(max_batch=16, max_queue=REQUESTS * 2, max_batch_tokens=48, context=200)
    with running(served, limits=limits) as server:
        store = server.engine.store
        store.resident_bytes = 12 * max(store.get(name).size for name in names)  # a quarter of them at a time

        async def whole(client, name, prompt):
            answer = await client.post("/v1/completions", json=body(name, prompt))
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        async def streamed(client, name, prompt):
            text = ""
            async with client.stream("POST", "/v1/completions", json=body(name, prompt, stream=True)) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            assert line == "" or line == "data: [DONE]"
            return text

        async def leaves(client, name, prompt):
            long = body(name, prompt, stream=True, max_tokens=100)
            async with client.stream("POST", "/v1/completions", json=long) as answer:
                async for _ in answer.aiter_lines():
                    return None

        async def churn(client, stop):
            """Adapters of other tenants are loaded, replaced and unloaded, some of them under way."""
            had: dict[str, set[str]] = {f"other{number}": set() for number in range(3)}
            asks = []
            for number in range(10_000):
                name, source = f"other{number % 3}", names[number % ADAPTERS]
                loaded = await client.post("/v1/adapters", json={"lora_name": name, "lora_path": source})
                assert loaded.status_code == 200, loaded.text
                had[name].add(expected[source, PROMPTS[0]])
                if number % 5 == 0:
                    ask = client.post("/v1/completions", json=body(name, PROMPTS[0]))
                    asks.append((name, asyncio.ensure_future(ask)))
                if number % 4 == 3:
                    assert (await client.delete(f"/v1/adapters/{name}")).status_code == 200
                if stop.is_set():
                    break
            for name, ask in asks:
                answer = await ask
                assert answer.status_code in (200, 404)  # it may be gone before its turn
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["text"] in had[name]
            return number

        async def main():
            stop = asyncio.Event()
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
                churning = asyncio.ensure_future(churn(client, stop))
                asked = [(dice.choice([None, *names]), dice.choice(PROMPTS)) for _ in range(REQUESTS)]
                kinds = [[whole, streamed, streamed, leaves][number % 4] for number in range(REQUESTS)]
                answers = await asyncio.gather(*(kind(client, *ask) for kind, ask in zip(kinds, asked, strict=True)))
                stop.set()
                assert await churning >= 10
                return asked, kinds, answers

        asked, kinds, answers = asyncio.run(main())
        for ask, kind, answer in zip(asked, kinds, answers, strict=True):
            if kind is not leaves:
                assert answer == expected[ask], ask
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "foreword_queue_length 0.0" in metrics
        assert store.bytes_resident <= store.resident_bytes


def test_a_full_queue_answers_429(crowd):
    folder, names, expected = crowd
    with running(folder, limits=Limits(max_batch=2, max_queue=3, context=200)) as server:

        async def main():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                asks = [client.post("/v1/completions", json=body(name, PROMPTS[0])) for name in names[:20]]
                return await asyncio.gather(*asks)

        answers = asyncio.run(main())
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    for name, answer in zip(names, answers, strict=False):
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected[name, PROMPTS[0]]
        else:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(crowd, stream):
    folder, names, expected = crowd
    with running(folder, limits=Limits(max_batch=1, max_queue=3, cache_tokens=8192, context=4000)) as server:
        server.engine.model.config.max_position_embeddings = 8192

        async def main():
            long = body(names[0], PROMPTS[0], max_tokens=3900, stream=stream)
            async with httpx.AsyncClient(base_url=server.url) as client:
                if stream:
                    async with client.stream("POST", "/v1/completions", json=long, timeout=60) as answer:
                        await anext(answer.aiter_lines())
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        await client.post("/v1/completions", json=long, timeout=0.3)
                answer = await client.post("/v1/completions", json=body(names[1], PROMPTS[1]), timeout=60)
                return answer.json()["choices"][0]["text"]

        assert asyncio.run(main()) == expected[names[1], PROMPTS[1]]
        assert not server.engine.running


@pytest.mark.parametrize("grace", [0.0, 30.0])
def test_a_shutdown_finishes_or_fails_each_request(crowd, grace):
    folder, names, _ = crowd
    with running(folder, limits=Limits(max_batch=4, context=200), grace=grace) as server:

        async def main():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                asks = [
                    asyncio.ensure_future(
                        client.post("/v1/completions", json=body(name, PROMPTS[0], max_tokens=80, stream=n % 2 == 1))
                    )
                    for n, name in enumerate(names[:8])
                ]
                while len(server.engine.running) < 4:
                    await asyncio.sleep(0.01)
                server.server.should_exit = True
                return await asyncio.gather(*asks)

        answers = asyncio.run(main())
        server.thread.join(60)
    for number, answer in enumerate(answers):
        if grace:
            assert answer.status_code == 200
            assert "error" not in answer.text
        elif number % 2 and answer.status_code == 200:  # the stream had begun
            assert "shutting down" in answer.text
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "shutting_down"
