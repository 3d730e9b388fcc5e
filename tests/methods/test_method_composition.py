"""Several methods at once, UniPELT's gates, and points of the space that no paper named."""

import pytest
import torch

import foreword as fw
import zoo
from foreword import combines, sources
from foreword.count import counted
from foreword.space import resolve


def shaken(model, method, name="default", std=0.3):
    adapter = fw.attach(model, method, name=name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.trainable_parameters:
            parameter += std * torch.randn(parameter.shape, generator=generator)
    return adapter


EVERYTHING = [
    "prefix-tuning",
    "zero-init",
    "parallel-adapter",
    "adapter",
    "multihead-adapter",
    "lora",
    "ia3",
    "llama-adapter-v2",
]


@torch.no_grad()
def test_everything_at_once_saves_loads_and_leaves(ids, tmp_path):
    model = zoo.make("llama")
    base = model(ids).logits
    adapter = shaken(model, EVERYTHING, std=0.05)
    adapted = model(ids).logits
    assert adapter.num_trainable == sum(counted(name, zoo.make("llama")).trainable for name in EVERYTHING)
    adapter.save(tmp_path)
    fw.detach(model, "default")
    assert torch.equal(model(ids).logits, base)
    loaded = fw.load(model, tmp_path)
    assert [method.name for method in loaded.methods] == EVERYTHING
    assert torch.equal(model(ids).logits, adapted)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["adapter", fw.SequentialAdapter(site="ffn")], "each puts a sequential adapter at model.layers.0.mlp"),
        ([fw.SequentialAdapter(), fw.SequentialAdapter(reads="residual")], "each puts a sequential adapter at model"),
        ([fw.SequentialAdapter()] * 2, "adapter and adapter can't compose"),
        (["full", "full"], "each puts a trained copy of the weights"),
        (["llama-adapter-v2", "llama-adapter-v2"], "each puts an in-place change at model.layers.0"),
    ],
)
def test_two_claims_on_one_place_are_refused(methods, message):
    model = zoo.make("llama")
    resolved = [resolve(method) for method in methods]
    with pytest.raises(fw.ForewordError, match=message):
        fw.attach(model, resolved)
    assert not hasattr(model, "foreword")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_refused_second_method_leaves_the_active_adapter(ids):
    model = zoo.make("llama")
    shaken(model, "lora")
    with torch.no_grad():
        adapted = model(ids).logits
        with pytest.raises(fw.ForewordError, match="no biases"):
            fw.attach(model, "bitfit", name="second")
        assert torch.equal(model(ids).logits, adapted)
    assert fw.adapters(model) == ["default"]


def test_a_new_adapter_starts_from_the_base_and_not_from_the_active_one(ids):
    states = []
    for first in (None, "lora", "full"):
        model = zoo.make("llama")
        if first is not None:
            shaken(model, first)
        states.append(fw.attach(model, fw.PrefixTuning(length=3), name="new").state_dict())
    for other in states[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in states[0].items())


POINTS = [
    (sources.NonLinear(length=3), combines.Joint(), "cross"),
    (sources.Projected(length=3), combines.Activation(), "self"),
    (sources.Mlp(length=3, hidden=5), combines.Kernel("gelu"), "encoder+self"),
    (sources.HeadBottleneck(length=3, init="normal"), combines.ZeroGate(opening=0.3), "all"),
    (sources.Memory(), combines.Kernel(mapped_keys=False), "cross"),
]


@pytest.mark.parametrize(("source", "combine", "attention"), POINTS, ids=lambda value: type(value).__name__)
def test_a_point_that_no_paper_named(ids, source, combine, attention, tmp_path):
    model = zoo.make("bart")
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    adapter = shaken(model, fw.Point(source, combine, attention=attention))
    logits = model(**inputs).logits
    logits.pow(2).mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in adapter.trainable_parameters)
    adapter.save(tmp_path)
    fw.detach(model, "default")
    fw.load(model, tmp_path)
    assert torch.equal(model(**inputs).logits, logits)


def test_absolute_positions_move_only_for_a_prefix_that_stands_in_the_context():
    model = zoo.make("gpt2")
    shifts = {}
    for combine in (combines.Joint(), combines.Ungated(), combines.ZeroGate(), combines.Activation()):
        adapter = fw.attach(model, fw.Point(sources.Direct(length=3), combine))
        shifts[type(combine).__name__] = adapter.parts[0].shift
        fw.detach(model, "default")
    assert shifts == {"Joint": 3, "Ungated": 0, "ZeroGate": 0, "Activation": 0}


@torch.no_grad()
def test_a_prompt_is_read_through_its_adapters_own_projections(ids):
    """Zero-init prompts and a LoRA in one adapter: the prompt's keys and values come from the adapted layers."""
    model = zoo.make("llama")
    adapter = shaken(model, [fw.ZeroInit(length=3, layers=3), fw.Lora(r=4, alpha=8.0)])
    expected = model(ids).logits
    shaken(model, "lora", name="other")
    with fw.rows(model, ["default", "other"]):
        torch.testing.assert_close(model(ids).logits[0], expected[0], atol=1e-5, rtol=1e-5)
    fw.set_active(model, "default")
    state = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    fw.detach(model, "other")
    fw.detach(model, "default")
    for i, layer in enumerate(
        model.model.layers
    ):  # merge the LoRA; the prompts go on through what it makes of the weights
        for name in ("q_proj", "v_proj"):
            own = f"1.linear.{i}.self_attn-{name}"
            delta = state[f"{own}.lora_B.weight"] @ state[f"{own}.lora_A.weight"]
            getattr(layer.self_attn, name).weight += 2.0 * delta
    alone = fw.attach(model, fw.ZeroInit(length=3, layers=3)).state_dict()
    for name, tensor in alone.items():
        tensor.copy_(state[name])
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# UniPELT


@torch.no_grad()
def test_unipelt_is_its_parts_with_the_gates_of_the_prompt(llama, ids):
    from equations import Terms

    state = llama.attach(fw.UniPELT(length=3, hidden=5, bottleneck=4, r=2))
    gated = llama.logits(ids)
    keys = llama.model.foreword.adapters["default"].parts[0].shared()  # site → keys and values

    def gate(name, x):
        opening = torch.sigmoid(x @ state[f"{name}.weight"] + state[f"{name}.bias"])
        return opening.mean(1)

    class Gated(Terms):
        def linear(self, name, x, y):
            layer, _, path = name.partition(".")
            own = f"2.linear.{layer}.{path}"
            if f"{own}.lora_A.weight" not in state:
                self.x = x if path.endswith("k_proj") else getattr(self, "x", x)
                return y
            self.x = x
            low_rank = x @ state[f"{own}.lora_A.weight"].T @ state[f"{own}.lora_B.weight"].T
            return y + gate(f"{own}.gate", x)[:, None, None] * low_rank

        def prefix(self, site):
            opening = gate(f"0.{site}.gate", self.x)[:, None, None, None]
            return tuple(opening * tensor for tensor in keys[site])

        def ffn(self, site, x, h):
            down, up = (state[f"1.{site}.adapter.{name}"] for name in ("down", "up"))
            down_bias, up_bias = (state[f"1.{site}.adapter.{name}_bias"] for name in ("down", "up"))
            added = (h @ down.T + down_bias).clamp(min=0) @ up.T + up_bias
            return h + gate(f"1.{site}.gate", h)[:, None, None] * added

    torch.testing.assert_close(llama.naive(ids, Gated()), gated, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_unipelt_learns_from_the_prompt_that_labels_leave(ids):
    """Labels and `known_prompt` say the same, and no later token reaches an earlier logit."""
    model = zoo.make("llama")
    shaken(model, fw.UniPELT(length=3))
    labels = ids.clone()
    labels[:, :3] = -100
    logits = model(ids, labels=labels).logits
    with fw.known_prompt(labels == -100):
        assert torch.equal(model(ids).logits, logits)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % zoo.VOCABULARY
    torch.testing.assert_close(model(changed, labels=labels).logits[:, :-1], logits[:, :-1], atol=1e-5, rtol=1e-5)
    assert (model(changed).logits[:, 0] - model(ids).logits[:, 0]).abs().max() > 1e-4  # the whole input is the prompt


def test_unipelt_does_not_learn_from_an_unknown_prompt(ids):
    """Its gates would see the answer. Trainers that compute the loss themselves keep the labels from the model."""
    model = zoo.make("llama").train()
    fw.attach(model, fw.UniPELT(length=3))
    with pytest.raises(fw.ForewordError, match=r"nothing says where it ends: call the model with labels"):
        model(ids)
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(ids)
