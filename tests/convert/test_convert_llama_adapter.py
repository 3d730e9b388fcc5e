"""LLaMA-Adapter, its non-linear fork and LitGPT: their layouts, against their forward written out on their weights."""

from __future__ import annotations

import warnings
from pathlib import Path

import naive_llama as naive
import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

import foreword as fw
from foreword.convert import import_adapter

LENGTH, ADAPTED = 5, 2  # prompt tokens, adapted layers
IDS = torch.randint(naive.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
NETWORK = {"linear1.weight": (6, 64), "linear1.bias": (6,), "prompt.weight": (LENGTH * 32, 6), "prompt.bias": (160,)}


def draw(*shape: int, seed: int = 0, std: float = 0.5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def gates(size: float = 0.8) -> dict[str, Tensor]:
    """One for every layer; those of layers that are not adapted never moved from 0."""
    made = {f"layers.{i}.attention.gate": torch.zeros(1, naive.HEADS, 1, 1) for i in range(naive.LAYERS)}
    for layer in range(naive.LAYERS - ADAPTED, naive.LAYERS):
        made[f"layers.{layer}.attention.gate"] = draw(1, naive.HEADS, 1, 1, seed=layer, std=size)
    return made


def save(tensors: dict[str, Tensor], folder: Path) -> Path:
    path = folder / "adapter_adapter_len5_layer2_epoch5.pth"
    torch.save(tensors, path)
    return path


def their_read(tensors: dict[str, Tensor], prompts: Tensor, gate: str) -> naive.Read:
    """W_k p and W_v p in the top layers, behind what the gate lets through."""

    def read(layer: int, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> naive.Prompt | None:
        index = layer - (naive.LAYERS - len(prompts))
        if index < 0:
            return None
        key, value = ((prompts[index] @ w.T).view(-1, naive.GROUPS, naive.DIM).transpose(0, 1) for w in (w_k, w_v))
        g = tensors[f"layers.{layer}.attention.gate"].flatten()
        return naive.Prompt(key, value, {"tanh": torch.tanh(g), "raw": g, "none": None}[gate])

    return read


@torch.no_grad()
def assert_same_logits(
    path: Path, tensors: dict[str, Tensor], prompts: Tensor, gate: str = "tanh", **options
) -> fw.Adapter:
    model = naive.model()
    expected = naive.logits(model.state_dict(), IDS, their_read(tensors, prompts, gate), meta=True)
    base = model(IDS).logits
    adapter = import_adapter(model, path, gate=gate, **options)
    size = expected.abs().max().item()
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5 * size)
    assert (base - expected).abs().max() > 0.05 * size
    return adapter


@torch.no_grad()
def test_the_naive_llama_is_the_model():
    model = naive.model()
    for meta in (True, False):
        expected = naive.logits(model.state_dict(), IDS, lambda *_: None, meta)
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whole", [False, True], ids=["extracted", "training checkpoint"])
@pytest.mark.parametrize("gate", ["tanh", "raw", "none"])
def test_linear_prompts(gate, whole, tmp_path):
    tensors = gates(0.4) | {"adapter_query.weight": draw(ADAPTED * LENGTH, naive.WIDTH, seed=9)}
    path = save({"model": tensors, "epoch": 4} if whole else tensors, tmp_path)
    prompts = tensors["adapter_query.weight"].view(ADAPTED, LENGTH, -1)
    adapter = assert_same_logits(path, tensors, prompts, gate, length=LENGTH)
    assert adapter.methods[0].name == ("random-init" if gate == "none" else "zero-init")


def test_raw_gates_that_no_tanh_reaches(tmp_path):
    tensors = gates(2.0) | {"adapter_query.weight": draw(ADAPTED * LENGTH, naive.WIDTH, seed=9)}
    prompts = tensors["adapter_query.weight"].view(ADAPTED, LENGTH, -1)
    with pytest.warns(UserWarning, match="keys and values are stored"):
        assert_same_logits(save(tensors, tmp_path), tensors, prompts, "raw", length=LENGTH)


def network(name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {f"{name}.{part}": draw(*shape, seed=len(part)) for part, shape in shapes.items()}


def run(tensors: dict[str, Tensor], name: str, codes: Tensor, activation) -> Tensor:
    inner = codes
    if f"{name}.linear1.weight" in tensors:
        inner = activation(codes @ tensors[f"{name}.linear1.weight"].T + tensors[f"{name}.linear1.bias"])
    out = inner @ tensors[f"{name}.prompt.weight"].T + tensors[f"{name}.prompt.bias"]
    return out if inner is not codes else activation(out)


@pytest.mark.parametrize(
    ("activation", "function"), [("relu", torch.relu), ("leaky_relu", lambda x: leaky_relu(x, 0.1))]
)
@pytest.mark.parametrize("deep", [True, False], ids=["two layers", "one layer"])
def test_hypermodel(activation, function, deep, tmp_path):
    shapes = NETWORK if deep else {"prompt.weight": (LENGTH * 32, 64), "prompt.bias": (160,)}
    tensors = gates() | {"hyperAdapter.layer_embed.weight": draw(naive.LAYERS, 64)}
    tensors |= network("hyperAdapter.decoder", shapes)
    codes = tensors["hyperAdapter.layer_embed.weight"][-ADAPTED:]
    prompts = run(tensors, "hyperAdapter.decoder", codes, function).view(ADAPTED, LENGTH, -1)
    adapter = assert_same_logits(save(tensors, tmp_path), tensors, prompts, activation=activation)
    kept = deep and activation == "relu"
    assert adapter.methods[0].name == ("zero-init-nonlinear" if kept else "zero-init")


def test_a_hypermodel_without_gates_does_not_say_where_it_is(tmp_path):
    tensors = gates() | {"hyperAdapter.layer_embed.weight": draw(naive.LAYERS, 64)}
    tensors |= network("hyperAdapter.decoder", NETWORK)
    with pytest.raises(fw.ForewordError, match="how many layers"):
        import_adapter(naive.model(), save(tensors, tmp_path), gate="none")


def test_deepshare(tmp_path):
    shapes = {"linear1.weight": (6, 256), "linear1.bias": (6,), "prompt.weight": (32, 6), "prompt.bias": (32,)}
    tensors = gates() | {"adapter_query.weight": draw(ADAPTED * LENGTH, 256)} | network("hyperAdapter", shapes)
    codes = tensors["adapter_query.weight"].view(ADAPTED, LENGTH, 256)
    prompts = run(tensors, "hyperAdapter", codes, torch.relu)
    adapter = assert_same_logits(save(tensors, tmp_path), tensors, prompts, length=LENGTH)
    assert adapter.methods[0] == fw.ZeroInitNonlinear(LENGTH, (1, 2), form="deepshare", hidden=6)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({}, {}, "has 10 prompt rows and its lowest open gate in layer 1: they can't be 10 a layer"),
        ({}, {"length": 3}, "10 prompt rows: not 3 for some of 3 layers"),
        ({}, {"gate": "sigmoid"}, "gate must be"),
        ({}, {"activation": "swish"}, "activation must be"),
        ({"layers.1.attention.gate": torch.zeros(1, 4, 8, 1)}, {"length": LENGTH}, "typ_gate=adapt"),
        ({"layers.1.attention.gate": torch.zeros(1, 5, 1, 1)}, {"length": LENGTH}, r"expected \[1, 4, 1, 1\]"),
        ({"layers.3.attention.gate": torch.zeros(1, 4, 1, 1)}, {}, "gates of 4 layers; this model has 3"),
        ({"adapter_query.weight": torch.zeros(10, 16)}, {}, r"expected \['any', 32\]"),
        ({"adapter_query.weight": torch.full((10, 32), torch.nan)}, {"length": LENGTH}, "not finite"),
        ({}, {"task": 1}, "no option 'task'"),
    ],
)
def test_what_does_not_fit(change, options, reason, tmp_path):
    tensors = gates() | {"adapter_query.weight": draw(ADAPTED * LENGTH, naive.WIDTH)} | change
    model = naive.model()
    with pytest.raises(fw.ForewordError, match=reason):
        import_adapter(model, save(tensors, tmp_path), **options)
    assert not hasattr(model, "foreword")


def test_a_pickle_is_numbers_and_nothing_else(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harmed"), "w"))

    torch.save({"adapter_query.weight": Harm()}, tmp_path / "adapter.pth")
    with pytest.raises(fw.ForewordError, match="as tensors and nothing else"):
        import_adapter(naive.model(), tmp_path / "adapter.pth")
    assert not (tmp_path / "harmed").exists()


# ---------------------------------------------------------------------------------------------------------------------
# LitGPT


def litgpt_file(folder: Path, size: float = 0.5) -> dict[str, Tensor]:
    tensors = {}
    for layer in (1, 2):
        tensors[f"transformer.h.{layer}.attn.adapter_wte.weight"] = draw(LENGTH, naive.WIDTH, seed=layer)
        tensors[f"transformer.h.{layer}.attn.gating_factor"] = draw(1, 1, naive.HEADS, 1, seed=layer + 5, std=size)
    torch.save({"model": tensors}, folder / "lit_model.pth.adapter")
    return tensors


def litgpt_read(tensors: dict[str, Tensor], fused: str) -> naive.Read:
    def read(layer: int, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> naive.Prompt | None:
        name = f"transformer.h.{layer}.attn."
        if f"{name}adapter_wte.weight" not in tensors:
            return None
        prompt, factor = tensors[f"{name}adapter_wte.weight"], tensors[f"{name}gating_factor"].flatten()
        if fused == "grouped":
            key, value = ((prompt @ w.T).view(LENGTH, naive.GROUPS, -1).transpose(0, 1) for w in (w_k, w_v))
            return naive.Prompt(key, value, factor)
        both = prompt @ torch.cat([w_q, w_k, w_v]).T  # (l, (H + 2G)·D)
        cut = both.view(LENGTH, naive.GROUPS, naive.HEADS // naive.GROUPS + 2, naive.DIM).permute(1, 2, 0, 3)
        return naive.Prompt(cut[:, -2], cut[:, -1], factor)

    return read


@torch.no_grad()
@pytest.mark.parametrize("fused", ["split", "grouped"])
@pytest.mark.parametrize("size", [0.2, 3.0])
def test_litgpt(fused, size, tmp_path):
    tensors = litgpt_file(tmp_path, size)
    model = naive.model()
    expected = naive.logits(model.state_dict(), IDS, litgpt_read(tensors, fused), meta=False)
    if fused == "grouped" and size < 1:
        import_adapter(model, tmp_path, fused=fused)
        assert fw.adapters(model) == ["default"]
    else:
        with pytest.warns(UserWarning, match="stored"):
            import_adapter(model, tmp_path, fused=fused)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


THEIRS = {  # of LitGPT's modules, those of transformers: fused ones in their order
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.proj": ["self_attn.o_proj"],
    "mlp.fc_1": ["mlp.gate_proj"],
    "mlp.fc_2": ["mlp.up_proj"],
    "mlp.proj": ["mlp.down_proj"],
    "norm_1": ["input_layernorm"],
    "norm_2": ["post_attention_layernorm"],
}


def litgpt_v2(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Scales, biases and norms by LitGPT's names, and (scale, bias) or (weight, -) by transformers'."""
    layers = {
        f"transformer.h.{i}.{name}": [f"model.layers.{i}.{one}" for one in many]
        for i in range(3)
        for name, many in THEIRS.items()
    }
    tensors, ours = {}, {}
    for seed, (name, many) in enumerate({**layers, "transformer.ln_f": ["model.norm"], "lm_head": ["lm_head"]}.items()):
        sizes = [len(weights[f"{one}.weight"]) for one in many]
        scale, bias = 1 + draw(sum(sizes), seed=seed, std=0.2), draw(sum(sizes), seed=seed + 99, std=0.2)
        ours |= dict(zip(many, zip(scale.split(sizes), bias.split(sizes), strict=True), strict=True))
        tensors |= (
            {f"{name}.weight": scale}
            if "norm" in many[0]
            else {f"{name}.adapter_scale": scale, f"{name}.adapter_bias": bias}
        )
    return tensors, ours


@torch.no_grad()
@pytest.mark.parametrize("fused", ["split", "grouped"])
def test_litgpt_v2(fused, tmp_path):
    model = naive.model()
    weights = model.state_dict()
    added, ours = litgpt_v2(weights)
    tensors = litgpt_file(tmp_path, 0.2) | added
    torch.save({"model": tensors}, tmp_path / "lit_model.pth.adapter_v2")
    (tmp_path / "lit_model.pth.adapter").unlink()

    def linear(name: str, x: Tensor, weight: Tensor) -> Tensor:
        scale, bias = ours[name]
        return scale * (x @ weight.T + bias)

    def read(layer: int, *projections: Tensor) -> naive.Prompt | None:
        name = f"transformer.h.{layer}.attn."
        if f"{name}adapter_wte.weight" not in tensors:
            return None
        prompt, factor = tensors[f"{name}adapter_wte.weight"], tensors[f"{name}gating_factor"].flatten()
        made = [
            linear(f"model.layers.{layer}.self_attn.{n}_proj", prompt, w)
            for n, w in zip("qkv", projections, strict=True)
        ]
        if fused == "grouped":
            return naive.Prompt(*(one.view(LENGTH, naive.GROUPS, -1).transpose(0, 1) for one in made[1:]), factor)
        cut = torch.cat(made, -1).view(LENGTH, naive.GROUPS, -1, naive.DIM).permute(1, 2, 0, 3)
        return naive.Prompt(cut[:, -2], cut[:, -1], factor)

    trained = weights | {f"{name}.weight": scale for name, (scale, _) in ours.items() if "norm" in name}
    expected = naive.logits(trained, IDS, read, meta=False, linear=linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that split prompts are stored as keys and values
        adapter = import_adapter(model, tmp_path, fused=fused)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert adapter.methods[0] == fw.LlamaAdapterV2(length=0, head=True)
    adapter.save(tmp_path / "ours")
    again = naive.model()
    fw.load(again, tmp_path / "ours")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    fw.detach(again, "default")
    assert torch.equal(again(IDS).logits, naive.model()(IDS).logits)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lm_head.adapter_scale": torch.ones(40)}, "has no transformer.h.0.attn.qkv.adapter_scale"),
        ({"transformer.h.7.attn.adapter_wte.weight": torch.zeros(5, 32)}, "a prompt of layer 7"),
        ({"transformer.h.1.attn.gating_factor": torch.zeros(1, 1, 3, 1)}, "has 3 gates in layer 1; the model 4"),
    ],
)
def test_what_does_not_fit_of_litgpt(change, reason, tmp_path):
    torch.save({"model": litgpt_file(tmp_path) | change}, tmp_path / "lit_model.pth.adapter")
    with pytest.raises(fw.ForewordError, match=reason):
        import_adapter(naive.model(), tmp_path)
