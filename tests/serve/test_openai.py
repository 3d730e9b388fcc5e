"""The routes, through OpenAI's own client."""

import json

import httpx
import openai
import pytest
from harness import BASE, METHODS, NEW

ADAPTERS = [f"a{number}" for number in range(len(METHODS))]
GREEDY = {"temperature": 0, "max_tokens": NEW, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_models_are_the_base_and_the_adapters(client):
    models = client.models.list().data
    assert [model.id for model in models] == [BASE, *ADAPTERS]
    assert client.models.retrieve("a1").id == "a1"


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_a_completion_is_what_the_adapter_answers_alone(client, alone, name):
    completion = client.completions.create(model=name or BASE, prompt="Hello, who", **GREEDY)
    choice = completion.choices[0]
    assert choice.text == alone.text("Hello, who", name)
    assert choice.finish_reason == "length"
    assert completion.usage.completion_tokens == NEW
    assert completion.usage.prompt_tokens == len("Hello, who")
    assert completion.usage.total_tokens == NEW + len("Hello, who")


def test_adapters_answer_differently(alone):
    """The comparison above can see a swapped adapter."""
    answers = {tuple(alone.ids("Hello, who", name)) for name in [None, *ADAPTERS]}
    assert len(answers) == len(ADAPTERS) + 1


def test_a_chat_goes_through_the_template(client, alone):
    messages = [{"role": "developer", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    chat = client.chat.completions.create(model="a0", messages=messages, **GREEDY)
    assert chat.choices[0].message.content == alone.text("<system>Be<end><user>Hi<end><assistant>", "a0")
    assert chat.choices[0].message.role == "assistant"


def test_streams_say_the_same(client, alone):
    stream = client.completions.create(
        model="a2", prompt="Tell", stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == alone.text("Tell", "a2")
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == NEW


def test_chat_streams_begin_with_the_role(client, alone):
    messages = [{"role": "user", "content": "Hi"}]
    chunks = list(client.chat.completions.create(model="a1", messages=messages, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == alone.text("<user>Hi<end><assistant>", "a1")


def test_several_prompts_and_choices(client, alone):
    prompts = ["One", "Number two"]
    completion = client.completions.create(model="a3", prompt=prompts, n=2, **GREEDY)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in completion.choices]
    assert texts == [alone.text(prompt, "a3") for prompt in prompts for _ in range(2)]


def test_token_ids_are_a_prompt(client, alone):
    ids = alone.tokenizer("Tell")["input_ids"]
    assert client.completions.create(model="a2", prompt=ids, **GREEDY).choices[0].text == alone.text("Tell", "a2")


def test_a_stop_string_ends_the_answer(client, alone):
    whole = alone.text("Tell", "a1")
    stop = whole[3:5]
    for stream in (False, True):
        answer = client.completions.create(model="a1", prompt="Tell", stop=[stop], stream=stream, **GREEDY)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_a_seed_repeats_and_the_temperature_counts(client):
    def sample(seed, temperature=2.0, model="a0"):
        answer = client.completions.create(
            model=model, prompt="Tell", seed=seed, temperature=temperature, max_tokens=NEW,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return answer.choices[0].text

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
    assert sample(3, temperature=0) == sample(4, temperature=0)


def test_a_seed_means_the_same_in_any_company_and_on_both_ways(server, client):
    """Rows that run packed, and rows that run through generate, draw the same numbers."""
    import concurrent.futures

    def sample(seed):
        return client.completions.create(
            model="a0", prompt="Tell", seed=seed, max_tokens=NEW, extra_body={"ignore_eos": True}
        ).choices[0].text  # fmt: skip

    alone_answers = [sample(seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(sample, range(8))) == alone_answers


def test_logprobs_are_the_models(server, client, alone):
    import torch

    ids = alone.tokenizer("Tell", return_tensors="pt")["input_ids"]
    logits = alone.model(ids).logits[0, -1].log_softmax(-1)
    values, top = logits.topk(3)
    completion = client.completions.create(
        model=BASE, prompt="Tell", temperature=0, max_tokens=1, logprobs=3, extra_body={"ignore_eos": True}
    )
    logprobs = completion.choices[0].logprobs
    torch.testing.assert_close(torch.tensor(logprobs.token_logprobs), values[:1].detach(), atol=1e-4, rtol=0)
    assert set(logprobs.top_logprobs[0]) == {alone.tokenizer.decode([int(token)]) for token in top}
    chat = client.chat.completions.create(
        model=BASE,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    )
    content = chat.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert content[0].logprob == max(entry.logprob for entry in content[0].top_logprobs)


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "nobody"}, 404, "nobody"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": "x" * 300}, 400, "300 tokens"),
        ({"max_tokens": 10_000}, 400, "10000"),
        ({"temperature": 9}, 400, "temperature"),
        ({"n": 100}, 400, "n"),
        ({"prompt": [1, 100_000]}, 400, "100000"),
        ({"stop": ["a"] * 9}, 400, "stop"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"echo": True}, 400, "echo"),
    ],
)
def test_mistakes_are_told_in_openais_shape(server, change, status, says):
    body = {"model": "a0", "prompt": "Tell", "max_tokens": 4} | change
    answer = httpx.post(f"{server.url}/v1/completions", content=json.dumps(body))
    answer = httpx.post(
        f"{server.url}/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == status
    assert error.keys() == {"message", "type", "param", "code"}
    assert says in error["message"]


def test_clients_see_their_own_exceptions(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="a0", messages=[])
