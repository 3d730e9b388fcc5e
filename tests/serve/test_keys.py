"""Who may use, list, load and unload what."""

import json
import shutil
from contextlib import suppress

import httpx
import pytest
from harness import BASE, running

from foreword.errors import ForewordError
from foreword.serve.keys import VARIABLE, Keys, read_keys

KEYS = [
    {"key": "acme-key", "adapters": ["a0", "acme-*"], "base": False, "manage": True},
    {"key": "globex-key", "adapters": ["a1"]},
    {"key": "admin-key", "manage": True},
]


@pytest.fixture(scope="module")
def shared(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "adapters"
    shutil.copytree(folder, path)
    shutil.copytree(folder / "a0", path / "acme-new")
    shutil.copytree(folder / "a0", path.parent / "outside")
    (path / "acme-link").symlink_to(path.parent / "outside")
    file = path.parent / "keys.json"
    file.write_text(json.dumps(KEYS))
    with running(path, keys=read_keys(file)) as server:
        yield server


def ask(server, method, path, key=None, **body):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.request(method, server.url + path, json=body or None, headers=headers, timeout=60)


def complete(server, key, model):
    return ask(server, "POST", "/v1/completions", key, model=model, prompt="x", max_tokens=1).status_code


@pytest.mark.parametrize("key", [None, "wrong", "acme-ke", "acme-key2", "ACME-KEY"])
def test_no_valid_key_no_entry(shared, key):
    for method, path in [("GET", "/v1/models"), ("GET", "/v1/adapters"), ("DELETE", "/v1/adapters/a0")]:
        answer = ask(shared, method, path, key)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert complete(shared, key, "a0") == 401


def test_a_tenant_uses_and_sees_its_own(shared):
    assert complete(shared, "acme-key", "a0") == 200
    assert complete(shared, "acme-key", "a1") == 404
    assert complete(shared, "acme-key", BASE) == 404
    assert complete(shared, "globex-key", "a1") == 200
    assert complete(shared, "globex-key", BASE) == 200
    for path in ("/v1/models", "/v1/adapters"):
        seen = [one["id"] for one in ask(shared, "GET", path, "globex-key").json()["data"] if one["id"] != BASE]
        assert seen == ["a1"]
    assert ask(shared, "GET", "/v1/models/a0", "globex-key").status_code == 404


def test_what_a_tenant_may_not_use_looks_as_if_it_did_not_exist(shared):
    hidden = ask(shared, "POST", "/v1/completions", "globex-key", model="a0", prompt="x").json()
    absent = ask(shared, "POST", "/v1/completions", "globex-key", model="zz", prompt="x").json()
    assert hidden["error"] | {"message": absent["error"]["message"].replace("zz", "a0")} == hidden["error"]


def test_a_tenant_manages_its_own(shared):
    assert ask(shared, "DELETE", "/v1/adapters/a1", "acme-key").status_code == 404
    assert ask(shared, "DELETE", "/v1/adapters/a1", "globex-key").status_code == 403
    assert ask(shared, "POST", "/v1/load_lora_adapter", "globex-key", lora_name="a1").status_code == 403
    load = ask(shared, "POST", "/v1/load_lora_adapter", "acme-key", lora_name="acme-x", lora_path="acme-new")
    assert load.status_code == 200
    assert complete(shared, "acme-key", "acme-x") == 200
    assert ask(shared, "POST", "/v1/unload_lora_adapter", "acme-key", lora_name="acme-x").status_code == 200
    assert complete(shared, "acme-key", "acme-x") == 404


@pytest.mark.parametrize(
    "path",
    ["a1", "../outside", "../adapters/a1", "/etc", "acme-link", ".", "acme-new/../a1", "acme\0", "x" * 400, "acme-no"],
)
def test_an_adapter_comes_from_ones_own_part_of_the_folder(shared, path):
    answer = ask(shared, "POST", "/v1/adapters", "acme-key", lora_name="acme-y", lora_path=path)
    assert answer.status_code in (400, 404)
    assert complete(shared, "acme-key", "acme-y") == 404
    assert "served" not in answer.text  # no path of the machine


def test_an_administrator_may_all(shared):
    names = [one["id"] for one in ask(shared, "GET", "/v1/adapters", "admin-key").json()["data"]]
    assert {"a0", "a1", "acme-new"} <= set(names)
    assert ask(shared, "POST", "/v1/adapters", "admin-key", lora_name=BASE, lora_path="a0").status_code == 400


def test_health_and_metrics_need_no_key_and_name_nobody(shared):
    assert ask(shared, "GET", "/health").json() == {"status": "ok"}
    assert complete(shared, "acme-key", "a0") == 200
    metrics = ask(shared, "GET", "/metrics").text
    assert 'foreword_requests_total{route="/v1/completions",status="200"}' in metrics
    assert "acme" not in metrics


def test_a_large_body_is_refused(shared):
    url = f"{shared.url}/v1/completions"
    size = shared.service.max_body + 1
    assert httpx.post(url, content=b"x" * size).status_code == 413

    def parts():
        for _ in range(size // 65536 + 1):
            yield b"x" * 65536

    with suppress(httpx.WriteError):  # the server may hang up first
        assert httpx.post(url, content=parts()).status_code == 413  # without a declared length


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not read_keys()
    assert Keys().access(None).manage
    monkeypatch.setenv(VARIABLE, json.dumps(KEYS))
    assert read_keys().access("globex-key").allows("a1")
    assert read_keys().access("nobody") is None


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({}, "list of keys"),
        ([], "at least one"),
        ([{"adapters": []}], 'key 1: needs "key"'),
        ([{"key": "x", "adapter": ["a"]}], "unknown field 'adapter'"),
        ([{"key": "x", "adapters": "a"}], "list of names"),
        ([{"key": "x", "manage": "no"}], "true or false"),
        ([{"key": "x"}, {"key": "x"}], "twice"),
    ],
)
def test_wrong_keys_are_told(monkeypatch, entries, says):
    monkeypatch.setenv(VARIABLE, json.dumps(entries))
    with pytest.raises(ForewordError, match=says):
        read_keys()
