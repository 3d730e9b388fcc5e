"""PEFT's adapters against PEFT's own forward, and back."""

from __future__ import annotations

import json
import warnings

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor

import foreword as fw
import zoo
from conformance import shake, text
from foreword.convert import export_adapter, import_adapter

LENGTH = 4
SETTINGS = {
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=LENGTH),
    "PREFIX_TUNING, projected": lambda: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=LENGTH, prefix_projection=True, encoder_hidden_size=12
    ),
    "CARTRIDGE": lambda: peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=LENGTH, num_frozen_tokens=1),
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=LENGTH),
    "P_TUNING": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=LENGTH, encoder_hidden_size=12
    ),
    "P_TUNING, LSTM": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=LENGTH,
        encoder_hidden_size=12,
        encoder_reparameterization_type="LSTM",
    ),
    "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=LENGTH, adapter_layers=2),
}
ARCHITECTURES = {"ADAPTION_PROMPT": ["llama", "mistral"]}
DECODERS = ["llama", "qwen3", "gpt_neox", "gptj", "gpt2", "opt"]  # rotated, QK-norm, partly, by a table; embedded
CELLS = [(a, kind) for kind in SETTINGS for a in ARCHITECTURES.get(kind, DECODERS)]


def trained(architecture: str, config: peft.PeftConfig) -> PeftModel:
    """An adapter of PEFT's with every parameter away from its start."""
    model = get_peft_model(zoo.make(architecture), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if "gate" in name else 0.3))
    return model.eval()


@torch.no_grad()
def peft_logits(model: PeftModel, ids: Tensor, **kwargs) -> Tensor:
    """Of the text's tokens: PEFT gives those of an inserted prompt too."""
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **kwargs).logits[:, -ids.shape[1] :]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-5 of the largest logit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "kind"), CELLS)
def test_peft_s_logits(architecture, kind, tmp_path):
    theirs = trained(architecture, SETTINGS[kind]())
    expected = peft_logits(theirs, text())
    theirs.save_pretrained(tmp_path)
    model = zoo.make(architecture)
    base = model(text()).logits
    import_adapter(model, tmp_path)
    assert_same(model(text()).logits, expected)
    assert not torch.allclose(base, expected, atol=1e-2), "the adapter does nothing"


@torch.no_grad()
@pytest.mark.parametrize("task", [0, 2])
def test_a_task_of_a_multitask_prompt(task, tmp_path):
    config = peft.MultitaskPromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=LENGTH, num_tasks=3, num_ranks=2
    )
    theirs = trained("llama", config)
    for parameter in theirs.prompt_encoder.parameters():
        parameter.mul_(3)
    theirs.save_pretrained(tmp_path)
    expected = peft_logits(theirs, text(), task_ids=torch.tensor([task]))
    model = zoo.make("llama")
    with pytest.warns(UserWarning, match=f"the prompt of task {task}"):
        import_adapter(model, tmp_path, task=task)
    assert_same(model(text()).logits, expected)
    with pytest.raises(fw.ForewordError, match=r"tasks 0 … 2, not 3"):
        import_adapter(model, tmp_path, "another", task=3)


@torch.no_grad()
def test_the_format_that_older_versions_wrote(tmp_path):
    theirs = trained("llama", SETTINGS["PREFIX_TUNING"]())
    theirs.save_pretrained(tmp_path, safe_serialization=False)
    assert (tmp_path / "adapter_model.bin").exists()
    model = zoo.make("llama")
    import_adapter(model, tmp_path)
    assert_same(model(text()).logits, peft_logits(theirs, text()))


@torch.no_grad()
def test_gates_that_no_tanh_reaches(tmp_path):
    theirs = trained("llama", SETTINGS["ADAPTION_PROMPT"]())
    for name, parameter in theirs.named_parameters():
        if "adaption_gate" in name:
            parameter.fill_(-1.7)
    theirs.save_pretrained(tmp_path)
    model = zoo.make("llama")
    with pytest.warns(UserWarning, match="no tanh reaches"):
        adapter = import_adapter(model, tmp_path)
    assert_same(model(text()).logits, peft_logits(theirs, text()))
    assert adapter.methods[0].name == "point"


METHODS = {
    "prefix-tuning": fw.PrefixTuning(LENGTH),
    "prefix-tuning, shared": fw.PrefixTuning(LENGTH, reparam="shared", hidden=8),
    "prefix-tuning, frozen": fw.PrefixTuning(LENGTH, frozen_tokens=2),
    "prompt-tuning": fw.PromptTuning(LENGTH),
    "lora": fw.Lora(2),
    "ia3": fw.IA3(),
    "vera": fw.Vera(4),
}


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("name", METHODS)
def test_peft_reads_what_is_written(architecture, name, tmp_path):
    model = zoo.make(architecture)
    adapter = fw.attach(model, METHODS[name])
    shake(adapter)
    expected = model(text()).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a reparameterisation is evaluated
        export_adapter(adapter, tmp_path, "peft")
    theirs = PeftModel.from_pretrained(zoo.make(architecture), tmp_path).eval()
    assert_same(peft_logits(theirs, text()), expected)
    if isinstance(METHODS[name], (fw.PrefixTuning, fw.PromptTuning)):
        fw.detach(model, "default")
        import_adapter(model, tmp_path)
        assert_same(model(text()).logits, expected)


@torch.no_grad()
def test_llama_adapter_with_one_gate_a_layer(tmp_path):
    model = zoo.make("llama")
    adapter = fw.attach(model, fw.ZeroInit(LENGTH, layers=2))
    shake(adapter)
    with pytest.raises(fw.ForewordError, match="one gate a layer"):
        export_adapter(adapter, tmp_path, "peft")
    for module in adapter.parts[0].modules.values():
        module.combine.gate.fill_(0.4)
    export_adapter(adapter, tmp_path, "peft")
    theirs = PeftModel.from_pretrained(zoo.make("llama"), tmp_path).eval()
    assert_same(peft_logits(theirs, text()), model(text()).logits)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (fw.MultiheadAdapter(4), "no multihead-adapter"),
        (fw.PrefixTuning(LENGTH, layers=2), "every self-attention"),
        (fw.ZeroInit(LENGTH, layers=(0,)), "top n layers"),
        ([fw.PrefixTuning(LENGTH), fw.Lora(2)], "holds one method"),
    ],
)
def test_what_peft_can_t_express(method, reason, tmp_path):
    adapter = fw.attach(zoo.make("llama"), method)
    with pytest.raises(fw.ForewordError, match=reason):
        export_adapter(adapter, tmp_path / "out", "peft")
    assert not (tmp_path / "out").exists()


def test_notes_of_what_is_lost(tmp_path):
    adapter = fw.attach(zoo.make("mistral-window"), fw.PrefixTuning(LENGTH, reparam="per-layer", hidden=4))
    with pytest.warns(UserWarning, match="evaluated"), pytest.warns(UserWarning, match="sliding window"):
        export_adapter(adapter, tmp_path, "peft")


def edit(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda f: edit(f, peft_type="LORA"), "load it with PEFT"),
        (lambda f: edit(f, num_virtual_tokens=9), r"expected \[9, 'any'\]"),
        (lambda f: edit(f, num_transformer_submodules=2), "only those of decoders"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "is damaged"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "holds no weights"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "must hold a JSON object"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "which library"),
    ],
)
def test_damage_is_named(harm, reason, tmp_path):
    trained("llama", SETTINGS["PREFIX_TUNING"]()).save_pretrained(tmp_path)
    harm(tmp_path)
    model = zoo.make("llama")
    with pytest.raises(fw.ForewordError, match=reason):
        import_adapter(model, tmp_path)
    assert fw.adapters(model) == []


def test_another_model(tmp_path):
    trained("llama", SETTINGS["PREFIX_TUNING"]()).save_pretrained(tmp_path)
    model = zoo.make("gpt2")
    with pytest.raises(fw.ForewordError, match="96 numbers a token; 3 layers of this model's self attention need 192"):
        import_adapter(model, tmp_path)
    assert not hasattr(model, "foreword")
