"""AdapterHub's adapters against its own forward, in an environment of its own.

`adapters` pins another transformers. To run these tests, make a virtual environment with torch and `adapters`, and name
its interpreter:

    FOREWORD_ADAPTERS_PYTHON=/path/to/venv/bin/python pytest tests/convert/test_convert_adapterhub.py
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf

import foreword as fw
from foreword.convert import import_adapter

PYTHON = os.environ.get("FOREWORD_ADAPTERS_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="FOREWORD_ADAPTERS_PYTHON names no interpreter with `adapters`")
CLASSES = {
    "bert": hf.BertForMaskedLM,
    "roberta": hf.RobertaForMaskedLM,
    "bart": hf.BartForConditionalGeneration,
    "t5": hf.T5ForConditionalGeneration,
    "llama": hf.LlamaForCausalLM,
    "gpt2": hf.GPT2LMHeadModel,
}
KINDS = ["prefix", "prefix-flat", "par-bn", "seq-bn", "double-seq-bn", "double-seq-bn-swish", "seq-bn-scaled", "mam"]
KINDS += ["unipelt"]
REFUSED = {
    ("t5", "prefix"): "relative positions",
    ("t5", "prefix-flat"): "relative positions",
    ("t5", "mam"): "relative positions",
    ("bart", "seq-bn-scaled"): "both sides have the same",
    ("t5", "seq-bn-scaled"): "both sides have the same",
} | {(architecture, "unipelt"): "post-norm encoders" for architecture in ("bart", "t5", "llama", "gpt2")}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapterhub")
    script = Path(__file__).with_name("adapterhub_reference.py")
    subprocess.run([PYTHON, script, folder], check=True, capture_output=True, env=os.environ | {"PYTHONPATH": ""})
    return folder


def logits(model: hf.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    sides = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **sides).logits


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", CLASSES)
def test_their_logits(references, architecture, kind):
    ids = torch.load(references / "ids.pt")
    expected = torch.load(references / architecture / kind / "logits.pt")
    model = CLASSES[architecture].from_pretrained(references / architecture / "base").eval()
    size = expected.abs().max().item()
    assert (logits(model, ids) - expected).abs().max() > 0.1 * size, "the adapter does nothing"
    if reason := REFUSED.get((architecture, kind)):
        with pytest.raises(fw.ForewordError, match=reason):
            import_adapter(model, references / architecture / kind)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how UniPELT's gates average
        import_adapter(model, references / architecture / kind)
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-5 * size)


def test_a_prompt_on_an_encoder_is_refused(references):
    model = CLASSES["bert"].from_pretrained(references / "bert" / "base")
    with pytest.raises(fw.ForewordError, match="prompt_tuning on BertForMaskedLM"):
        import_adapter(model, references / "bert" / "prompt")


def test_another_model_is_refused(references):
    model = CLASSES["gpt2"].from_pretrained(references / "gpt2" / "base")
    with pytest.raises(fw.ForewordError, match="for a llama model; this one is gpt2"):
        import_adapter(model, references / "llama" / "mam")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"phm_layer": True}, "phm_layer"),
        ({"non_linearity": "elu"}, "non_linearity='elu'"),
        ({"residual_before_ln": "post_add"}, "residual_before_ln"),
    ],
)
def test_what_has_no_method_is_named(references, setting, reason, tmp_path):
    folder = references / "bert" / "seq-bn"
    config = json.loads((folder / "adapter_config.json").read_text())
    config["config"] |= setting
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_adapter.bin").write_bytes((folder / "pytorch_adapter.bin").read_bytes())
    model = CLASSES["bert"].from_pretrained(references / "bert" / "base")
    with pytest.raises(fw.ForewordError, match=reason):
        import_adapter(model, tmp_path)
    assert not hasattr(model, "foreword")
