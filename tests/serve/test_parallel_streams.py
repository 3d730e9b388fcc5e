"""The number of parallel streams is a field of the request, and rows of one batch may differ in it."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from harness import BASE, NEW, make_model, running, save_adapters

import foreword as fw
import tiny

PROMPT = "Hello, who"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("streams")
    save_adapters(path, [fw.ParScale(streams=(1, 2, 3), length=3, init="normal"), "prefix-tuning"])
    return path


@pytest.fixture(scope="module")
def served(folder):
    with running(folder) as server:
        yield server


def body(streams: int | None, model: str = "a0") -> dict:
    chosen = {} if streams is None else {"streams": streams}
    return {"model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **chosen}


def alone(folder, streams: int | None) -> str:
    model, tokenizer = make_model(), tiny.tokenizer()
    fw.load(model, folder / "a0")
    fw.set_streams(model, streams)
    ids = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_each_request_reads_the_set_that_it_asks_for(served, folder):
    asked = [None, 1, 2, 3] * 2
    expected = {streams: alone(folder, streams) for streams in set(asked)}
    assert len(set(expected.values())) == 3  # without a number the largest set is read
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda p: httpx.post(f"{served.url}/v1/completions", json=body(p), timeout=60), asked))
    texts = [reply.json()["choices"][0]["text"] for reply in replies]
    assert texts == [expected[streams] for streams in asked]


@pytest.mark.parametrize(
    ("streams", "model", "problem"),
    [(4, "a0", "has streams 1, 2, 3"), (2, "a1", "no parallel streams"), (2, BASE, "no parallel streams")],
)
def test_a_number_without_a_set_is_refused(served, streams, model, problem):
    reply = httpx.post(f"{served.url}/v1/completions", json=body(streams, model), timeout=60)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]
