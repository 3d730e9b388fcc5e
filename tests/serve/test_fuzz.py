"""Random requests, made from the application's own schema, and bodies that are no JSON: never a 500."""

import json
import shutil
from contextlib import suppress

import httpx
import pytest
from harness import BASE, running
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from foreword.serve.limits import Limits

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")


@pytest.fixture(scope="module")
def fuzzed(folder, tmp_path_factory):
    """A server of its own: requests may unload its adapters. Answers are short."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("fuzzed") / "adapters")
    with running(path, limits=Limits(context=24, max_batch=16, max_batch_tokens=64, cache_tokens=2048)) as server:
        yield server


def require_no_server_error(response):
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert json.loads(response.content)["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_is_a_server_error(fuzzed, mode):
    """Bodies, paths and queries that follow the schema, and ones that break it."""
    api = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) >= 11
    for operation in operations:
        cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))

        @settings(
            max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(case=cases)
        def check(case):
            require_no_server_error(case.call(timeout=60))

        with suppress(Unsatisfiable):  # a route without parameters can't be called wrongly
            check()


VALID = {"model": BASE, "prompt": "x", "max_tokens": 2}
CHAT = {"model": "a0", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/adapters", "/v1/load_lora_adapter"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"1e999", b'"x"', b"\xff\xfe", b"[" * 50_000, b'{"model": NaN}', b'{"x": "\\ud800"}'],
)
def test_no_body_is_a_server_error(fuzzed, path, content):
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        answer = httpx.post(fuzzed.url + path, content=content, headers={"content-type": kind})
        assert 400 <= answer.status_code < 500
        require_no_server_error(answer)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1e-300},
        {"temperature": 5e-324, "top_p": 1e-12},
        {"top_p": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1, "n": 8},
        {"seed": 2**70},
        {"max_tokens": 10**400},
        {"logprobs": 20},
        {"stop": ["", "\x00"]},
        {"stop": []},
        {"prompt": "\x00\u202e\U0010ffff"},
        {"prompt": [[3], [4, 5]], "n": 3, "logprobs": 0},
        {"prompt": [0]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["", "x"]},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
        {"stream_options": 3},
        {"logit_bias": {"5": 100}},
        {"\ud800": 1},
    ],
    ids=str,
)
def test_edges_of_the_fields(fuzzed, change):
    content = json.dumps({**VALID, **change})
    answer = httpx.post(
        f"{fuzzed.url}/v1/completions", content=content, headers={"content-type": "application/json"}, timeout=60
    )
    require_no_server_error(answer)
    assert answer.status_code == 400 or '"error"' not in answer.text


def test_a_huge_seed_with_many_choices_stays_in_range(fuzzed):
    answer = httpx.post(f"{fuzzed.url}/v1/chat/completions", json={**CHAT, "seed": 2**63 - 1, "n": 8}, timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 8
