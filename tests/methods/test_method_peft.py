"""LoRA, IA3 and VeRA by PEFT, BitFit and full fine-tuning: their equations, and that they leave all else alone."""

import peft
import pytest
import torch
from equations import Terms

import foreword as fw
import zoo


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


class OnLinears(Terms):
    """y of a linear layer from x, by the tensors of an adapter file."""

    def __init__(self, state, change):
        self.state, self.change = state, change

    def linear(self, name, x, y):
        kind = "encoder-linear" if name.startswith("encoder-") else "linear"
        layer, _, path = name.removeprefix("encoder-").partition(".")
        prefix = f"0.{kind}.{layer}.{path}."
        own = {key.removeprefix(prefix): value for key, value in self.state.items() if key.startswith(prefix)}
        return self.change(own, x, y) if own else y


@pytest.mark.parametrize("targets", ["query+value", "ffn", "all"])
def test_lora(twin, ids, targets):
    state = twin.attach(fw.Lora(r=4, alpha=12.0, targets=targets))
    terms = OnLinears(state, lambda own, x, y: y + 3.0 * x @ own["lora_A.weight"].T @ own["lora_B.weight"].T)
    close(twin.logits(ids), twin.naive(ids, terms))


def test_lora_adapts_queries_and_values(llama):
    names = fw.attach(llama.model, "lora").state_dict()
    assert {name.split(".")[3] for name in names} == {"self_attn-q_proj", "self_attn-v_proj"}


def test_ia3_scales_keys_before_their_rotation(twin, ids):
    """Keys and values by their output, the last matrix of the FFN by its input: folded, the same model."""
    state = twin.attach(fw.IA3())
    scaled = twin.logits(ids)
    fw.set_active(twin.model, None)
    inner = ("down_proj", "mlp-c_proj", "fc2")

    def change(own, x, y):
        return y * own["ia3_l"].flatten()

    terms = OnLinears({k: v for k, v in state.items() if not any(name in k for name in inner)}, change)
    parameters = dict(twin.model.named_parameters())
    with torch.no_grad():
        for key, value in state.items():
            if any(name in key for name in inner):
                kind, layer, path = key.split(".")[1:4]
                weight = next(
                    parameter
                    for name, parameter in parameters.items()
                    if f".{layer}.{path.replace('-', '.')}." in name
                    and name.endswith("weight")
                    and (("encoder." in name) == (kind == "encoder-linear") or twin.model.config.model_type != "bart")
                )
                weight *= value.flatten()[:, None] if twin.model.config.model_type == "gpt2" else value.flatten()
    close(twin.naive(ids, terms), scaled)


def test_vera(twin, ids):
    state = twin.attach(fw.Vera(r=4))
    layer = next(module for module in twin.model.modules() if hasattr(module, "vera_A"))
    (a,), (b,) = layer.vera_A.values(), layer.vera_B.values()

    def change(own, x, y):
        low_rank = own["vera_lambda_d"] * (x @ a[:, : x.shape[-1]].T)
        return y + own["vera_lambda_b"] * (low_rank @ b[: y.shape[-1]].T)

    close(twin.logits(ids), twin.naive(ids, OnLinears(state, change)))


def test_i17_lora_merges_into_the_weights(llama, ids):
    state = llama.attach(fw.Lora(r=4, alpha=8.0))
    adapted = llama.logits(ids)
    fw.detach(llama.model, "default")
    with torch.no_grad():
        for i, layer in enumerate(llama.model.model.layers):
            for name in ("q_proj", "v_proj"):
                own = f"0.linear.{i}.self_attn-{name}"
                delta = state[f"{own}.lora_B.weight"] @ state[f"{own}.lora_A.weight"]
                getattr(layer.self_attn, name).weight += 2.0 * delta
    close(llama.logits(ids), adapted)


@pytest.mark.parametrize("method", ["lora", "ia3", "vera"])
def test_beside_a_lora_of_the_users(llama, ids, method):
    """It keeps its gradients, its place and its output, and PEFT's mark on the model stays PEFT's."""
    model = llama.model
    peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False), model, "mine"
    )
    own = llama.logits(ids)
    modules = {name: id(module) for name, module in model.named_modules()}
    gradients = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    llama.attach([fw.PrefixTuning(length=3), fw.methods()[method]()])
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if "mine" in name)
    both = llama.logits(ids)
    assert (both - own).abs().max() > 1e-2
    fw.set_active(model, None)
    assert torch.equal(llama.logits(ids), own)
    fw.attach(model, method, name="second")
    fw.set_active(model, "default")
    assert torch.equal(llama.logits(ids), both)
    assert list(model.peft_config) == ["mine"]
    fw.detach(model, "default")
    fw.detach(model, "second")
    assert torch.equal(llama.logits(ids), own)
    assert {name: id(module) for name, module in model.named_modules()} == modules
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == gradients


def test_a_lora_injected_after_a_prefix(llama, ids):
    """PEFT freezes the prefix, which can be taken back; both then learn."""
    adapter = fw.attach(llama.model, fw.PrefixTuning(length=3))
    prefixed, trainable = llama.logits(ids), adapter.num_trainable
    peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), llama.model, "late"
    )
    assert (llama.logits(ids) - prefixed).abs().max() > 1e-2
    assert adapter.num_trainable == 0
    assert adapter.requires_grad_().num_trainable == trainable
    llama.model(ids).logits.pow(2).mean().backward()
    learns = [name for name, parameter in llama.model.named_parameters() if parameter.grad is not None]
    assert any("late" in name for name in learns)
    assert all(parameter.grad.abs().max() > 0 for parameter in adapter.trainable_parameters)
    fw.detach(llama.model, adapter.name)
    assert any("late" in name for name, _ in llama.model.named_parameters())


def test_an_adapter_whose_layers_peft_has_wrapped_is_not_saved(llama, tmp_path):
    adapter = fw.attach(llama.model, fw.PrefixTuning(length=3, reparam="shared", hidden=8))
    adapter.save(tmp_path)
    peft.get_peft_model(llama.model, peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(fw.ForewordError, match=r"PEFT has wrapped a layer of its own \(0\.shared"):
        adapter.save(tmp_path)
    assert fw.load(zoo.make("llama"), tmp_path).methods == adapter.methods


@pytest.mark.parametrize("method", ["ia3", "vera", "full"])
def test_rows_refuses_what_acts_on_every_row(llama, method):
    fw.attach(llama.model, method, name="a")
    refused = pytest.raises(fw.ForewordError, match=f"rows can't mix adapter 'a': {method} acts on every row")
    with refused, fw.rows(llama.model, ["a", None]):
        pass
    with fw.rows(llama.model, ["a", "a"]):  # the active adapter alone
        pass


def test_ia3_refuses_experts():
    with pytest.raises(fw.ForewordError, match="ia3 can't reach every matrix of MixtralSparseMoeBlock in layer 0"):
        fw.attach(zoo.make("mixtral"), "ia3")


def test_unknown_targets():
    with pytest.raises(fw.ForewordError, match="'q_proj' is not 'query'"):
        fw.attach(zoo.make("llama"), fw.Lora(targets="q_proj"))


# ---------------------------------------------------------------------------------------------------------------------
# The model's own parameters


def test_bitfit_trains_biases_alone(ids):
    model = zoo.make("gpt2")
    adapter = fw.attach(model, "bitfit")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert (
        adapter.num_trainable
        == adapter.num_stored
        == sum(p.numel() for n, p in model.named_parameters() if "bias" in n)
    )


def test_bitfit_refuses_a_model_without_biases():
    with pytest.raises(fw.ForewordError, match="LlamaForCausalLM has no biases; llama-adapter-v2"):
        fw.attach(zoo.make("llama"), "bitfit")


@pytest.mark.parametrize("method", ["full", "bitfit"])
def test_an_optimizer_step_changes_the_tenant_and_not_the_base(ids, method):
    model = zoo.make("gpt2")
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    outputs = {}
    for name in ("a", "b"):
        adapter = fw.attach(model, method, name=name)
        optimizer = torch.optim.AdamW(adapter.trainable_parameters, lr=0.1 if name == "a" else 0.3)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        outputs[name] = model(ids).logits.detach()
    for name, output in outputs.items():
        fw.set_active(model, name)
        assert torch.equal(model(ids).logits, output)
    fw.set_active(model, None)
    assert all(torch.equal(parameter, base[name]) for name, parameter in model.named_parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert adapter.num_trainable > 0
    fw.detach(model, "a")
    fw.detach(model, "b")
    assert all(torch.equal(parameter, base[name]) for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_inactive_tenant_is_saved_with_its_own_values(ids, tmp_path):
    model = zoo.make("llama")
    adapter = fw.attach(model, "full")
    with torch.no_grad():
        for parameter in adapter.trainable_parameters:
            parameter += 0.1
    tuned = model(ids).logits
    fw.set_active(model, None)
    adapter.save(tmp_path)
    fresh = zoo.make(
        "llama"
    ).model  # another class around the same layers has no head: its own are enough to be refused
    with pytest.raises(fw.ForewordError, match=r"unknown 0\.weights\.lm_head\.weight"):
        fw.load(fresh, tmp_path)
    other = zoo.make("llama")
    fw.load(other, tmp_path)
    assert torch.equal(other(ids).logits, tuned)
