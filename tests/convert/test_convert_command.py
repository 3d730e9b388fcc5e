"""`foreword convert`: from another library and back, and each mistake in one line."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from peft import get_peft_model

import foreword as fw
import tiny
from foreword.cli import main
from foreword.convert import FORMATS

IDS = torch.arange(3, 12)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def theirs(base, tmp_path_factory):
    """A prefix of PEFT's, and its logits."""
    torch.manual_seed(0)
    model, _ = fw.base(base)
    wrapped = get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    folder = tmp_path_factory.mktemp("peft")
    wrapped.save_pretrained(folder)
    with torch.no_grad():
        return folder, wrapped(IDS, attention_mask=torch.ones_like(IDS)).logits


def run(capsys, *words) -> tuple[int, str, str]:
    code = main(["convert", *(str(word) for word in words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_from_peft_and_back(theirs, base, tmp_path, capsys):
    source, expected = theirs
    code, out, err = run(capsys, source, "--from", "peft", "--model", base, "--output", tmp_path / "ours", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["format"], summary["methods"], summary["notes"]) == ("peft", "prefix-tuning", [])
    model, _ = fw.base(base)
    fw.load(model, tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    code, out, err = run(capsys, tmp_path / "ours", "--to", "peft", "--output", tmp_path / "back")
    assert code == 0, err
    code, out, err = run(capsys, tmp_path / "back", "--output", tmp_path / "again", "--json")
    assert code == 0, err
    again = fw.load(fw.base(base)[0], tmp_path / "again").state_dict()
    for name, tensor in fw.load(fw.base(base)[0], tmp_path / "ours").state_dict().items():
        torch.testing.assert_close(again[name], tensor, atol=1e-6, rtol=0)


def test_merged_weights(base, tmp_path, capsys):
    model, _ = fw.base(base)
    adapter = fw.attach(model, fw.Lora(r=2))
    with torch.no_grad():
        for parameter in adapter.trainable_parameters:
            parameter.normal_(std=0.3)
        expected = model(IDS).logits
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter.save(tmp_path / "lora")
    code, _, err = run(capsys, tmp_path / "lora", "--to", "merged", "--output", tmp_path / "merged")
    assert code == 0, err
    merged, _ = fw.base(tmp_path / "merged")
    assert not any("lora" in name for name in merged.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", [fw.IA3(), fw.Vera(4), fw.Full()])
def test_merging_leaves_the_model_bit_for_bit(method, base, tmp_path):
    from foreword.convert import export_adapter

    model, _ = fw.base(base)
    adapter = fw.attach(model, method)
    with torch.no_grad():
        for parameter in adapter.trainable_parameters:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        expected = model(IDS).logits
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        export_adapter(adapter, tmp_path / "merged", "merged")
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        torch.testing.assert_close(fw.base(tmp_path / "merged")[0](IDS).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("{peft}", "needs --output"),
        ("/nowhere --output out", "there is no /nowhere"),
        ("{peft} --from pfet --output out", "there is no format 'pfet'"),
        ("{peft} --output out --task 1 --gate raw", "peft has no option 'gate'; it has task"),
        ("{peft} --output out --to cartridges", "cartridges is a format to read, not to write"),
        ("{peft} --output out --to merged", "prefix-tuning does not fold into a model's weights"),
        ("{base} --output out", "can't tell which library wrote"),
    ],
)
def test_each_mistake_in_one_line(words, reason, theirs, base, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words.format(peft=theirs[0], base=base).split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err
    assert not list(tmp_path.iterdir())


def test_help_names_the_formats_and_the_flag(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    shown = capsys.readouterr().out
    assert "--from FROM" in shown
    for name, one in FORMATS.items():
        assert name in shown, one
