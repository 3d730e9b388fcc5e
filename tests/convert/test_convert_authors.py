"""P-tuning v2, He et al. and Cartridges: their layouts, against their forward put into a model with plain hooks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

import foreword as fw
import zoo
from conformance import text
from foreword.convert import import_adapter

LENGTH, BOTTLENECK, HEADS, WIDTH = 4, 6, 4, 32
IDS = text().clamp(min=3)  # the zoo's RoBERTa pads with 1


def draw(*shape: int, seed: int, std: float = 0.4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def concatenating(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention over [prefix; tokens], as the authors' code has it; the prefix (H, l, D) is `module.their_prefix`."""
    mask = attention_mask
    if hasattr(module, "their_prefix"):
        prefix = [state.expand(len(key), -1, -1, -1) for state in module.their_prefix]
        key, value = (torch.cat([one, state], dim=2) for one, state in zip(prefix, (key, value), strict=True))
        if mask is not None:
            mask = nn.functional.pad(mask, (prefix[0].shape[2], 0))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    heads = weights @ value
    if hasattr(module, "beside_heads"):
        added = module.beside_heads(module.entered)
        heads = heads + added.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return heads.transpose(1, 2), None


AttentionInterface.register("concatenating", concatenating)
AttentionMaskInterface.register("concatenating", eager_mask)


def theirs(architecture: str) -> PreTrainedModel:
    model = zoo.make(architecture)
    model.set_attn_implementation("concatenating")
    return model


def attentions(model: PreTrainedModel) -> dict[str, list[nn.Module]]:
    """The attention modules of each kind, in the order of the layers."""
    if model.config.model_type == "bart":
        decoder = model.model.decoder.layers
        return {
            "self": [layer.self_attn for layer in decoder],
            "cross": [layer.encoder_attn for layer in decoder],
            "encoder": [layer.self_attn for layer in model.model.encoder.layers],
        }
    return {"self": [layer.attention.self for layer in model.base_model.encoder.layer]}


def logits(model: PreTrainedModel, **kwargs) -> Tensor:
    sides = {"decoder_input_ids": text(seed=3)} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False, **sides, **kwargs).logits


@torch.no_grad()
def assert_same_logits(architecture: str, source: Path, expected: Tensor) -> fw.Adapter:
    model = zoo.make(architecture)
    base = logits(model)
    adapter = import_adapter(model, source)
    size = expected.abs().max().item()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5 * size)
    assert (base - expected).abs().max() > 0.02 * size
    return adapter


def place(modules: list[nn.Module], flat: Tensor) -> None:
    """Give each of L attentions its keys and values out of (l, 2·L·d): a layer's keys, then its values."""
    stacked = flat.view(LENGTH, 2 * len(modules), HEADS, -1).permute(1, 2, 0, 3)
    for index, module in enumerate(modules):
        module.their_prefix = stacked[2 * index], stacked[2 * index + 1]


def mlp(tensors: dict[str, Tensor], embedding: str, layers: str) -> Tensor:
    inner = torch.tanh(linear(tensors[embedding], tensors[f"{layers}.0.weight"], tensors[f"{layers}.0.bias"]))
    return linear(inner, tensors[f"{layers}.2.weight"], tensors[f"{layers}.2.bias"])


def drawn_mlp(embedding: str, layers: str, outputs: int, seed: int) -> dict[str, Tensor]:
    return {
        embedding: draw(LENGTH, WIDTH, seed=seed),
        f"{layers}.0.weight": draw(5, WIDTH, seed=seed + 1),
        f"{layers}.0.bias": draw(5, seed=seed + 2),
        f"{layers}.2.weight": draw(outputs, 5, seed=seed + 3),
        f"{layers}.2.bias": draw(outputs, seed=seed + 4),
    }


# ---------------------------------------------------------------------------------------------------------------------
# P-tuning v2: keys and values in the cache, positions after them


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["bert", "roberta"])
@pytest.mark.parametrize("projected", [False, True], ids=["embedding", "projection"])
def test_p_tuning_v2(architecture, projected, tmp_path):
    start = "prefix_encoder."
    tensors = {f"{start}embedding.weight": draw(LENGTH, 6 * WIDTH, seed=1)}
    flat = tensors[f"{start}embedding.weight"]
    if projected:
        tensors = drawn_mlp(f"{start}embedding.weight", f"{start}trans", 6 * WIDTH, seed=1)
        flat = mlp(tensors, f"{start}embedding.weight", f"{start}trans")
    tensors["classifier.weight"] = torch.zeros(2, WIDTH)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    model = theirs(architecture)
    place(attentions(model)["self"], flat)
    first = LENGTH + (2 if architecture == "roberta" else 0)  # RoBERTa counts from its padding index + 1
    positions = torch.arange(first, first + IDS.shape[1])[None]
    with pytest.warns(UserWarning, match=r"head \(classifier\)"):
        adapter = assert_same_logits(architecture, tmp_path, logits(model, position_ids=positions))
    assert adapter.methods[0].text_positions == "after"
    adapter.save(tmp_path / "ours")
    again = zoo.make(architecture)
    fw.load(again, tmp_path / "ours")
    assert torch.equal(logits(again), logits(adapter.model))
    with fw.rows(again, [None, "default", None]):  # shifted in its own row only
        mixed = logits(again)
    torch.testing.assert_close(mixed[1], logits(adapter.model)[1])
    torch.testing.assert_close(mixed[[0, 2]], logits(zoo.make(architecture))[[0, 2]])


@torch.no_grad()
def test_p_tuning_v2_on_a_decoder(tmp_path):
    """Other code keeps the layout for decoders: keys move to this library's positions."""
    tensors = {"transformer.prefix_encoder.embedding.weight": draw(LENGTH, 3 * 2 * 2 * 8, seed=1)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    [flat] = tensors.values()
    assert_same_logits("llama", tmp_path, with_cache("llama", flat.view(LENGTH, 6, 2, 8).permute(1, 2, 0, 3)))


def with_cache(architecture: str, states: Tensor) -> Tensor:
    """Logits after a cache of keys and values (2·L, G, l, D): positions count on after it."""
    cache = DynamicCache()
    for layer in range(len(states) // 2):
        pair = (state[None].expand(len(IDS), -1, -1, -1) for state in states[2 * layer : 2 * layer + 2])
        cache.update(*pair, layer)
    mask = torch.ones(len(IDS), LENGTH + IDS.shape[1], dtype=torch.long)
    return zoo.make(architecture)(input_ids=IDS, attention_mask=mask, past_key_values=cache).logits


# ---------------------------------------------------------------------------------------------------------------------
# Cartridges


@torch.no_grad()
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_cartridge(architecture, frozen, tmp_path):
    groups = 2 if architecture == "llama" else 4
    states = draw(6, groups, LENGTH, 8, seed=2)
    keys, values = states[::2, None], states[1::2, None]  # (L, 1, G, p, D)
    parts = {
        f"{name}_{kind}": nn.ParameterList([nn.Parameter(one[:, :, cut]) for one in tensors] if cut != slice(0) else [])
        for kind, tensors in (("keys", keys), ("values", values))
        for name, cut in (("trainable", slice(frozen, None)), ("frozen", slice(frozen)))
    }
    torch.save(parts, tmp_path / "cache-step64.pt")
    adapter = assert_same_logits(architecture, tmp_path / "cache-step64.pt", with_cache(architecture, states))
    assert adapter.methods[0] == fw.PrefixTuning(LENGTH, frozen_tokens=frozen)
    assert adapter.num_trainable == adapter.num_stored * (LENGTH - frozen) // LENGTH


def test_a_cartridge_of_another_model(tmp_path):
    parts = {f"trainable_{kind}": [draw(1, 2, LENGTH, 16, seed=1)] * 3 for kind in ("keys", "values")}
    torch.save(parts, tmp_path / "cache.pt")
    with pytest.raises(
        fw.ForewordError, match=r"trainable_keys.0 is torch.float32 \[1, 2, 4, 16\], expected \[1, 2, 'any', 8\]"
    ):
        import_adapter(zoo.make("llama"), tmp_path / "cache.pt")


# ---------------------------------------------------------------------------------------------------------------------
# He et al.


class Adapter:
    """s · (ReLU(LN?(x) W_d + b_d) W_u + b_u), LN? of the result for "out"."""

    def __init__(self, seed: int, norm: str, scale: float | None) -> None:
        self.norm, self.scale = norm, scale
        self.tensors = {
            "down_proj.weight": draw(BOTTLENECK, WIDTH, seed=seed),
            "down_proj.bias": draw(BOTTLENECK, seed=seed + 1),
            "up_proj.weight": draw(WIDTH, BOTTLENECK, seed=seed + 2),
            "up_proj.bias": draw(WIDTH, seed=seed + 3),
        }
        if norm != "none":
            self.tensors |= {
                f"adapter_layer_norm_before.{part}": draw(WIDTH, seed=seed + 4) for part in ("weight", "bias")
            }
        if scale is None:
            self.tensors["scale"] = torch.tensor([1.7])

    def __call__(self, x: Tensor) -> Tensor:
        own = self.tensors
        norm = (own.get("adapter_layer_norm_before.weight"), own.get("adapter_layer_norm_before.bias"))
        x = layer_norm(x, (WIDTH,), *norm) if self.norm == "in" else x
        inner = torch.relu(linear(x, own["down_proj.weight"], own["down_proj.bias"]))
        out = linear(inner, own["up_proj.weight"], own["up_proj.bias"]) * (
            own["scale"] if self.scale is None else self.scale
        )
        return layer_norm(out, (WIDTH,), *norm) if self.norm == "out" else out


def keep_input(module: nn.Module, holder: nn.Module) -> None:
    """Have the input of `module` on `holder` as `entered`."""

    def hook(_, args, kwargs):
        holder.entered = args[0] if args else kwargs["hidden_states"]

    module.register_forward_pre_hook(hook, with_kwargs=True)


def beside_ffn(first: nn.Module, last: nn.Module, adapter: Adapter) -> None:
    keep_input(first, last)
    last.register_forward_hook(lambda module, args, out: out + adapter(module.entered))


def behind(module: nn.Module, adapter: Adapter) -> None:
    module.register_forward_hook(lambda _, args, out: out + adapter(out))


def before_norm(norm: nn.Module, adapter: Adapter) -> None:
    """LN(s + A(LN(s))): the frozen norm of the residual sum s, twice."""
    norm.register_forward_pre_hook(lambda _, args: (args[0] + adapter(norm.forward(args[0])),))


def he_model(architecture: str, config: dict, tensors: dict[str, Tensor]) -> PreTrainedModel:
    """The authors' model: what `config` asks for, with its numbers added to `tensors` by the authors' names."""
    model = theirs(architecture)
    kinds = attentions(model)
    if config["attn_mode"] == "prefix":
        for kind, end in (("self", ""), ("cross", "2"), ("encoder", "_enc")):
            outputs = 2 * len(kinds.get(kind, kinds["self"])) * WIDTH
            names = f"prompt_model.wte{end}.weight", f"prompt_model.control_trans{end}"
            tensors |= drawn_mlp(*names, outputs, seed=10 * len(end))
            if kind in kinds:
                place(kinds[kind], mlp(tensors, *names))
    if config["attn_mode"] == "prefix_nomlp":
        names = {"self": "decoder_self_attn", "cross": "decoder_cross_attn", "encoder": "encoder_attn"}
        for kind, modules in kinds.items():
            for index, module in enumerate(modules):
                pair = [draw(LENGTH, WIDTH, seed=100 + 2 * index + part) for part in (0, 1)]
                module.their_prefix = [one.view(LENGTH, HEADS, -1).transpose(0, 1) for one in pair]
                for part, one in zip(("key", "value"), pair, strict=True):
                    tensors[f"prompt_model.{names[kind]}_{part}.{index}.weight"] = one
    paths = {module: f"pretrained_model.{path}" for path, module in model.named_modules()}
    seed = 200
    if config["attn_mode"] == "adapter":
        for module in [one for kind in kinds.values() for one in kind]:
            seed += 10
            adapter, where = Adapter(seed, "in", 1.0), paths[module]
            if config["attn_option"] == "parallel":
                keep_input(module, module)
                module.beside_heads = adapter
            elif architecture == "bart":
                behind(module.out_proj, adapter)
            else:
                where = where.replace(".self", ".output")
                behind(model.get_submodule(where.removeprefix("pretrained_model.")).dense, adapter)
            tensors |= {f"{where}.ef_attn_adapter.{name}": one for name, one in adapter.tensors.items()}
    if config["ffn_mode"] == "adapter":
        scalar = config["ffn_adapter_scalar"]
        for layer in [
            module for path, module in model.named_modules() if path.split(".")[-2:-1] in (["layers"], ["layer"])
        ]:
            seed += 10
            adapter = Adapter(
                seed, config["ffn_adapter_layernorm_option"], None if scalar == "learnable_scalar" else float(scalar)
            )
            where = paths[layer]
            first, last = (
                (layer.fc1, layer.fc2) if architecture == "bart" else (layer.intermediate.dense, layer.output.dense)
            )
            if config["ffn_option"] == "parallel":
                beside_ffn(first, last, adapter)
            elif config["ffn_option"] == "pfeiffer":
                where += ".output" if architecture == "roberta" else ""
                before_norm(layer.final_layer_norm if architecture == "bart" else layer.output.LayerNorm, adapter)
            else:
                where += ".output" if architecture == "roberta" else ""
                behind(last, adapter)
            tensors |= {f"{where}.ef_ffn_adapter.{name}": one for name, one in adapter.tensors.items()}
    return model


HE = {
    "prefix": {"attn_mode": "prefix", "attn_option": "concat"},
    "prefix_nomlp": {"attn_mode": "prefix_nomlp", "attn_option": "concat"},
    "attention parallel": {"attn_mode": "adapter", "attn_option": "parallel"},
    "attention sequential": {"attn_mode": "adapter", "attn_option": "sequential"},
    "ffn parallel": {"ffn_mode": "adapter", "ffn_option": "parallel"},
    "ffn sequential": {"ffn_mode": "adapter", "ffn_option": "sequential", "ffn_adapter_layernorm_option": "in"},
    "ffn pfeiffer": {"ffn_mode": "adapter", "ffn_option": "pfeiffer", "ffn_adapter_scalar": "1.0"},
    "ffn learned scale, norm out": {
        "ffn_mode": "adapter",
        "ffn_option": "parallel",
        "ffn_adapter_scalar": "learnable_scalar",
        "ffn_adapter_layernorm_option": "out",
    },
    "mam": {"attn_mode": "prefix", "attn_option": "concat", "ffn_mode": "adapter", "ffn_option": "parallel"},
}
DEFAULTS = {
    "attn_mode": "none",
    "ffn_mode": "none",
    "attn_bn": BOTTLENECK,
    "ffn_bn": BOTTLENECK,
    "preseqlen": LENGTH,
    "ffn_adapter_scalar": "4",
    "ffn_adapter_layernorm_option": "none",
}


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["bart", "roberta"])
@pytest.mark.parametrize("name", HE)
def test_he_et_al(architecture, name, tmp_path):
    config, tensors = DEFAULTS | HE[name], {}
    if architecture == "roberta" and name == "prefix_nomlp":
        tensors["prompt_model.encoder_attn_key.0.weight"] = torch.zeros(LENGTH, WIDTH)  # their unused copies
    model = he_model(architecture, config, tensors)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_logits(architecture, tmp_path, logits(model))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attn_mode": "prefix", "attn_option": "cross_attn"}, "attn_option='cross_attn'"),
        ({"attn_mode": "lora", "attn_option": "none"}, "attn_mode='lora'"),
        ({"ffn_mode": "mh_adapter", "ffn_option": "parallel"}, "ffn_mode='mh_adapter'"),
        ({}, "attn_mode='none' and ffn_mode='none'"),
        ({"ffn_mode": "adapter", "ffn_option": "parallel", "ffn_bn": 5}, "expected"),
        ({"ffn_mode": "adapter", "ffn_option": "parallel", "ffn_adapter_scalar": None}, "is no he-unified adapter"),
    ],
)
def test_what_does_not_convert_of_he_et_al(change, reason, tmp_path):
    tensors: dict[str, Tensor] = {}
    he_model("bart", DEFAULTS | HE["ffn parallel"], tensors)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(DEFAULTS | change))
    with pytest.raises(fw.ForewordError, match=reason):
        import_adapter(zoo.make("bart"), tmp_path)
