"""The authors' layout against their computation, rebuilt naively from the weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import Qwen2Config, Qwen2ForCausalLM

import foreword as fw
from foreword.convert.parscale import base_of, load_parscale, save_parscale

P, LENGTH, SMOOTH = 3, 5, 0.07
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DIM = 8


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def checkpoint(request, tmp_path):
    """A random checkpoint in the released layout."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, tie_word_embeddings=request.param)
    tensors = {name: torch.randn_like(x) * 0.3 for name, x in Qwen2ForCausalLM(config).state_dict().items()}
    if request.param:
        del tensors["lm_head.weight"]
    for layer in range(2):
        for name in ("prefix_k", "prefix_v"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.randn(P, 2, LENGTH, DIM)
    tensors["model.aggregate_layer.0.weight"] = torch.randn(32, P * 32) * 0.3
    tensors["model.aggregate_layer.0.bias"] = torch.randn(32)
    tensors["model.aggregate_layer.2.weight"] = torch.randn(P, 32)
    tensors["model.aggregate_layer.2.bias"] = torch.randn(P)
    save_file(tensors, tmp_path / "model.safetensors")
    own = {"parscale_n": P, "parscale_n_tokens": LENGTH, "parscale_attn_smooth": SMOOTH}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | own | {"model_type": "qwen2_parscale"}))
    return tmp_path


def their_logits(tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """One row and one stream at a time, everything written out."""
    weights = {name.removeprefix("model."): x for name, x in tensors.items()}
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return torch.stack([join([final(weights, row, p) for p in range(P)], weights) @ head.T for row in ids])


def final(weights: dict[str, Tensor], row: Tensor, stream: int) -> Tensor:
    length = len(row)
    x = weights["embed_tokens.weight"][row]
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))

    def rotate(y: Tensor) -> Tensor:  # (T, H, D)
        first, second = y.chunk(2, -1)
        return y * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    for layer in range(2):
        own = {k.removeprefix(f"layers.{layer}."): v for k, v in weights.items() if k.startswith(f"layers.{layer}.")}
        y = norm(x, own["input_layernorm.weight"])
        q, k, v = (
            (y @ own[f"self_attn.{n}_proj.weight"].T + own[f"self_attn.{n}_proj.bias"]).view(length, -1, DIM)
            for n in "qkv"
        )
        q, k = rotate(q), rotate(k)
        heads = []
        for head in range(4):
            group = head // 2
            keys = torch.cat([own["self_attn.prefix_k"][stream, group], k[:, group]])
            values = torch.cat([own["self_attn.prefix_v"][stream, group], v[:, group]])
            scores = q[:, head] @ keys.T / DIM**0.5
            hidden = torch.arange(LENGTH + length)[None] > LENGTH + torch.arange(length)[:, None]
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
        x = x + torch.cat(heads, -1) @ own["self_attn.o_proj.weight"].T
        y = norm(x, own["post_attention_layernorm.weight"])
        gate, up = y @ own["mlp.gate_proj.weight"].T, y @ own["mlp.up_proj.weight"].T
        x = x + (silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def join(hidden: list[Tensor], weights: dict[str, Tensor]) -> Tensor:
    together = torch.stack([hidden[p][:, h] for h in range(32) for p in range(P)], -1)
    inner = silu(together @ weights["aggregate_layer.0.weight"].T + weights["aggregate_layer.0.bias"])
    share = (inner @ weights["aggregate_layer.2.weight"].T + weights["aggregate_layer.2.bias"]).softmax(-1)
    share = share * (1 - SMOOTH) + SMOOTH / P
    return sum(share[:, p, None] * hidden[p] for p in range(P))


@torch.no_grad()
def test_their_logits(checkpoint):
    model = base_of(checkpoint)
    adapter = load_parscale(model, checkpoint)
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(1))
    expected = their_logits(load_file(checkpoint / "model.safetensors"), ids)
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-4, rtol=2e-4)
    assert adapter.methods[0] == fw.ParScale(P, LENGTH, smoothing=SMOOTH)


@torch.no_grad()
def test_back_to_their_layout(checkpoint, tmp_path):
    model = base_of(checkpoint)
    adapter = load_parscale(model, checkpoint)
    save_parscale(adapter, tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["parscale_n"], config["parscale_n_tokens"], config["parscale_attn_smooth"]) == (P, LENGTH, SMOOTH)
    again = base_of(tmp_path / "back")
    load_parscale(again, tmp_path / "back")
    ids = torch.randint(40, (2, 7))
    assert torch.equal(again(ids).logits, model(ids).logits)


@torch.no_grad()
def test_a_reparameterised_set_is_written_in_its_stored_form(checkpoint, tmp_path):
    model = base_of(checkpoint)
    adapter = fw.attach(model, fw.ParScale((1, 2, 4), LENGTH, "per-layer"))
    ids = torch.randint(40, (2, 7))
    fw.set_streams(model, 2)
    expected = model(ids).logits
    with pytest.raises(fw.ForewordError, match="give streams, one of 2, 4"):
        save_parscale(adapter, tmp_path / "out")
    save_parscale(adapter, tmp_path / "out", streams=2)
    again = base_of(tmp_path / "out")
    load_parscale(again, tmp_path / "out")
    torch.testing.assert_close(again(ids).logits, expected)


def test_another_base_is_refused(checkpoint):
    torch.manual_seed(1)
    own = base_of(checkpoint)
    with torch.no_grad():
        own.model.norm.weight.add_(1)
    with pytest.raises(fw.ForewordError, match="trained with its own base"):
        load_parscale(own, checkpoint)
    tied = own.config.tie_word_embeddings
    deeper = Qwen2ForCausalLM(Qwen2Config(**SIZES | {"num_hidden_layers": 3}, tie_word_embeddings=tied))
    with pytest.raises(fw.ForewordError, match=r"lacks model\.layers\.2"):
        load_parscale(deeper, checkpoint)
    wider = Qwen2ForCausalLM(Qwen2Config(**SIZES | {"intermediate_size": 64}, tie_word_embeddings=tied))
    with pytest.raises(fw.ForewordError, match=r"\[32, 48\], this model's \[32, 64\]"):
        load_parscale(wider, checkpoint)
    assert not hasattr(wider, "foreword")


def test_other_adapters_have_no_place_in_the_layout(checkpoint, tmp_path):
    model = base_of(checkpoint)
    adapter = fw.attach(model, [fw.ParScale(2, LENGTH), fw.PrefixTuning(2)])
    with pytest.raises(fw.ForewordError, match="holds parscale alone"):
        save_parscale(adapter, tmp_path / "out")


def test_a_damaged_checkpoint(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(fw.ForewordError, match="is damaged"):
        base_of(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(fw.ForewordError, match='no number "parscale_n"'):
        base_of(checkpoint)
