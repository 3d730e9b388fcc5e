"""The Hub, with a folder in the place of the client that talks to it."""

import io
import json
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import HfHubHTTPError

import foreword as fw
import tiny
import zoo
from conformance import shake, text
from foreword import generation, hub
from foreword.cli import main


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """Repositories as folders, written by the client's calls and read by its snapshot."""
    root = tmp_path / "hub"

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, *, private, exist_ok):
            huggingface_hub.utils.validate_repo_id(repo_id)
            (root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
            (root / repo_id / ".private").write_text(str(private))

        def upload_folder(self, *, repo_id, folder_path, allow_patterns, delete_patterns, commit_message):
            for old in (root / repo_id).iterdir():
                if any(fnmatch(old.name, pattern) for pattern in delete_patterns):
                    old.unlink()
            for file in Path(folder_path).iterdir():
                if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                    shutil.copy(file, root / repo_id)
            return f"https://hub/{repo_id}/commit/1"

    def snapshot(repo_id, allow_patterns):
        assert allow_patterns == ["adapter.json", "adapter-*.safetensors", "training.json"]
        if not (root / repo_id).is_dir():
            raise huggingface_hub.errors.LocalEntryNotFoundError("no such repository")
        return str(root / repo_id)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return root


@pytest.fixture
def folder(tmp_path):
    adapter = fw.attach(zoo.make("llama"), fw.PrefixTuning(length=4))
    shake(adapter)
    return adapter.save(tmp_path / "support")


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if not file.name.startswith(".")}


@torch.no_grad()
def test_there_and_back(folder, remote):
    (folder / "checkpoints").mkdir()
    (folder / "notes.txt").write_text("mine")
    assert hub.push(folder, "me/support", private=True) == "https://hub/me/support/commit/1"
    [weights] = folder.glob("*.safetensors")
    assert names(remote / "me/support") == {"adapter.json", weights.name, "README.md"}
    assert (remote / "me/support/.private").read_text() == "True"
    there, here = zoo.make("llama"), zoo.make("llama")
    fw.load(there, "me/support")
    fw.load(here, folder)
    assert torch.equal(there(text()).logits, here(text()).logits)


def test_straight_from_a_model(remote):
    adapter = fw.attach(zoo.make("llama"), fw.ZeroInit(length=2))
    adapter.push_to_hub("me/fresh")
    assert fw.load(zoo.make("llama"), "me/fresh").methods == adapter.methods
    assert "| zero-init | `length` | `2` |" in (remote / "me/fresh/README.md").read_text()


def test_a_newer_adapter_takes_the_place_of_the_older(folder, remote):
    hub.push(folder, "me/support")
    fw.attach(zoo.make("llama"), fw.ZeroInit(length=2)).save(folder)
    hub.push(folder, "me/support")
    assert len(list((remote / "me/support").glob("*.safetensors"))) == 1
    assert fw.load(zoo.make("llama"), "me/support").methods == [fw.ZeroInit(length=2)]


def test_a_card_of_the_user_s_own_stays(folder, remote):
    (folder / "README.md").write_text("mine")
    hub.push(folder, "me/support")
    assert (remote / "me/support/README.md").read_text() == "mine"


def test_the_card_says_what_the_files_say(tmp_path):
    base = tiny.save(tmp_path / "base")
    data = tiny.write_jsonl(tmp_path / "data.jsonl", tiny.rows(24))
    out = tmp_path / "words"
    words = f"train {data} --model {base} --output_dir {out} --method zero-init --method.length 4 --max_steps 2 --json"
    assert main(words.split()) == 0
    (out / "scores.json").write_text(json.dumps({"exact match": 0.75, "BLEU": 31.52}))
    assert main(["push", str(out), "me/words", "--card_only"]) == 0
    text = (out / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["library_name"] == "foreword"
    assert "zero-init" in header["tags"]
    model, _ = fw.base(base)
    adapter = fw.load(model, out)
    for line in (
        "| method | zero-init |",
        f"| base | {base} |",
        f"| numbers | {adapter.num_stored:,} |",
        "| zero-init | `length` | `4` |",
        "| examples | 22 |",
        "| held out | 2 |",
        "| steps | 2 |",
        "| exact match | 0.75 |",
        "| BLEU | 31.52 |",
        'fw.load(model, "me/words")',
        f'fw.base("{base}")',
    ):
        assert line in text, line
    history = json.loads((out / "training.json").read_text())["history"]
    [loss] = [line["eval_loss"] for line in history if "eval_loss" in line][-1:]
    assert f"| eval loss | {loss:.4f} |" in text


@pytest.mark.parametrize("command", ["generate --prompt hi", "chat"])
def test_an_adapter_from_the_hub_is_asked_as_it_was_trained(command, remote, tmp_path, monkeypatch, capsys):
    base = tiny.save(tmp_path / "base")
    data = tiny.write_jsonl(tmp_path / "data.jsonl", tiny.rows(24))
    words = f"train {data} --model {base} --output_dir {tmp_path / 'plain'} --max_steps 1 --method.length 2"
    assert main(words.split()) == 0
    hub.push(tmp_path / "plain", "me/plain")
    asked = []

    def encode(tokenizer, texts, prompts):
        asked.extend(prompts)
        return real(tokenizer, texts, prompts)

    real = generation.encode
    monkeypatch.setattr(generation, "encode", encode)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main([*command.split(), "--adapter", "me/plain", "--max_new_tokens", "2"]) == 0
    assert asked == ["hi"]


@pytest.mark.parametrize(
    ("scores", "reason"),
    [("[1]", "an object of names and numbers"), ('{"a": "b"}', "names and numbers"), ("{", "JSON")],
)
def test_damaged_scores_are_named(folder, scores, reason):
    (folder / "scores.json").write_text(scores)
    with pytest.raises(fw.ForewordError, match=reason):
        hub.write_card(folder)


def test_refusals_in_one_line(folder, remote, monkeypatch, capsys, tmp_path):
    assert main(["push", str(tmp_path), "me/support"]) == 2
    assert "adapter.json does not exist" in capsys.readouterr().err
    assert main(["push", str(folder), "me//support"]) == 2
    assert "can't push to me//support" in capsys.readouterr().err

    def refuse(*args, **kwargs):
        import httpx

        response = httpx.Response(403, request=httpx.Request("POST", "https://hub"))
        raise HfHubHTTPError("403 Forbidden\nyou may not", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", refuse)
    assert main(["push", str(folder), "me/support"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "403 Forbidden" in err


def test_a_repository_that_is_not_there(remote):
    with pytest.raises(fw.ForewordError, match="neither a local adapter folder nor a reachable Hub repository"):
        fw.load(zoo.make("llama"), "me/nothing")
