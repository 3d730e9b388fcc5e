"""`attach`, `detach`, `set_active` and the handle: what they promise of the model, and their errors."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import foreword as fw
import zoo
from conformance import close, shake, small, text
from surroundings import State, assert_unchanged, attach_or_skip, is_one_line, refusal

METHODS = list(fw.methods())


@pytest.fixture
def model():
    return zoo.make("llama")


def logits(model, ids=None):
    with torch.no_grad():
        return model(text() if ids is None else ids).logits


# ---------------------------------------------------------------------------------------------------------------------
# What attach gives, and what detach gives back


def test_by_object_by_name_and_by_list(model):
    first = fw.attach(model, fw.ZeroInit(length=3, layers=1), name="support")
    assert (first.name, first.model) == ("support", model)
    assert first.methods == [fw.ZeroInit(length=3, layers=1)]
    second = fw.attach(model, "zero-init")
    assert second.name == "default"
    assert second.methods == [fw.ZeroInit()]
    third = fw.attach(model, ["prefix-tuning", fw.ZeroInit(length=2)], name="both")
    assert third.methods == [fw.PrefixTuning(), fw.ZeroInit(length=2)]
    assert fw.adapters(model) == ["support", "default", "both"]
    assert "support" in repr(first)
    assert "ZeroInit(length=3" in repr(first)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_adapter_is_trainable(model, method):
    adapter = attach_or_skip(model, small(method))
    assert type(model) is hf.LlamaForCausalLM
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(p) for p in trainable} == {id(p) for p in adapter.trainable_parameters}
    assert adapter.num_trainable == sum(parameter.numel() for parameter in trainable) > 0
    assert adapter.num_stored > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_next", "t5"])
def test_detach_restores_everything(architecture, method):
    """Numbers, names, hooks, classes, modes, and exactly the `requires_grad` that there was."""
    model = zoo.make(architecture)
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 > 0)
    model.train()
    before = State.of(model)
    if refusal(fw.attach, model, small(method)):
        assert_unchanged(model, before)
        return
    shake(model.foreword.adapters["default"])
    fw.attach(model, small(method), name="second")
    fw.detach(model, "default")
    fw.detach(model, "second")
    assert_unchanged(model, before)


def test_a_forward_and_a_backward_change_nothing_of_the_base(model):
    before = State.of(model)
    adapter = fw.attach(model, fw.PrefixTuning(length=4))
    optimizer = torch.optim.AdamW(adapter.trainable_parameters, lr=0.1)
    model.train()
    for _ in range(2):
        model(input_ids=text(), labels=text()).loss.backward()
        optimizer.step()
    model.generate(text(), max_new_tokens=2)
    model.eval()
    fw.detach(model, "default")
    assert_unchanged(model, before)


def test_adapters_take_turns(model):
    base = logits(model)
    outs = {}
    for name, seed in [("a", 1), ("b", 2)]:
        shake(fw.attach(model, fw.PrefixTuning(length=4), name=name), seed=seed)
        outs[name] = logits(model)
    assert not torch.equal(outs["a"], outs["b"])
    fw.set_active(model, "a")
    assert torch.equal(logits(model), outs["a"])
    fw.set_active(model, None)
    assert torch.equal(logits(model), base)
    fw.set_active(model, "b")
    fw.detach(model, "a")
    assert torch.equal(logits(model), outs["b"])
    fw.detach(model, "b")
    assert torch.equal(logits(model), base)


def test_detaching_the_active_adapter_leaves_the_base(model):
    base = logits(model)
    shake(fw.attach(model, fw.PrefixTuning(length=4), name="a"))
    shake(fw.attach(model, fw.PrefixTuning(length=4), name="b"))
    fw.detach(model, "b")
    assert fw.adapters(model) == ["a"]
    assert torch.equal(logits(model), base)


def test_a_name_can_be_used_again(model):
    fw.attach(model, "zero-init")
    fw.detach(model, "default")
    shake(fw.attach(model, fw.PrefixTuning(length=4)))
    once = logits(model)
    fw.detach(model, "default")
    shake(fw.attach(model, fw.PrefixTuning(length=4)))
    assert torch.equal(logits(model), once)


def test_seeds(model):
    def numbers(seed):
        adapter = fw.attach(model, fw.ZeroInitNonlinear(length=4), seed=seed)
        state = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
        fw.detach(model, "default")
        return torch.cat([tensor.flatten() for tensor in state.values()])

    torch.manual_seed(1)
    first = numbers(0)
    torch.manual_seed(2)
    assert torch.equal(numbers(0), first)
    assert not torch.equal(numbers(1), first)


@pytest.mark.parametrize("method", METHODS)
def test_attaching_leaves_the_global_generator_alone(model, method):
    before = torch.get_rng_state()
    attach_or_skip(model, small(method))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ["llama", "bart", "gpt2"])
def test_a_deep_copy_is_independent(architecture, method):
    model = zoo.make(architecture)
    inputs = {"input_ids": text()}
    if architecture == "bart":
        inputs["decoder_input_ids"] = text(seed=3)
    adapter = attach_or_skip(model, small(method))
    shake(adapter)
    with torch.no_grad():
        expected = model(**inputs).logits
        twin = copy.deepcopy(model)
        assert fw.adapters(twin) == ["default"]
        assert torch.equal(twin(**inputs).logits, expected)
        shake(adapter, seed=5)
        assert not torch.equal(model(**inputs).logits, expected)
        assert torch.equal(twin(**inputs).logits, expected)
        fw.detach(model, "default")
        assert torch.equal(twin(**inputs).logits, expected)
        fw.detach(twin, "default")
        assert torch.equal(twin(**inputs).logits, model(**inputs).logits)


def test_a_deep_copied_handle_works_on_the_copy(model):
    adapter = fw.attach(model, fw.PrefixTuning(length=4, reparam="shared", hidden=8))
    twin = copy.deepcopy(adapter)
    assert twin.model is not model
    expected = logits(model)
    twin.fold()
    assert not adapter.folded
    close(logits(twin.model), expected)
    assert torch.equal(logits(model), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Errors: one line, and the model as it was


@pytest.mark.parametrize(
    ("method", "kwargs", "message"),
    [
        ("prefix-tunning", {}, "did you mean 'prefix-tuning'"),
        ("nonsense!", {}, "zero-init"),
        (3, {}, "neither a method nor the name"),
        ([], {}, "at least one method"),
        ("zero-init", {"name": ""}, "name"),
        ("zero-init", {"name": "a.b"}, "'a.b'"),
        ("zero-init", {"name": 5}, "5"),
        ("zero-init", {"name": "keys"}, "'keys'"),
        (fw.PrefixTuning(length=4), {"init_ids": [5, 6]}, "2 tokens, fewer than the 4"),
        (fw.PrefixTuning(length=4), {"init_ids": []}, "0 tokens"),
        (fw.PrefixTuning(length=2), {"init_ids": [5, zoo.VOCABULARY]}, f"{zoo.VOCABULARY}"),
        (fw.PrefixTuning(length=2), {"init_ids": [5, -1]}, "-1"),
        (fw.PrefixTuning(length=2), {"init_ids": "hi"}, "init_ids"),
        (fw.PrefixTuning(length=2, layers=0), {}, "layers=0"),
        (fw.PrefixTuning(length=2, layers=4), {}, "has 3 self-attention layers"),
        (fw.PrefixTuning(length=2, layers=(1, 3)), {}, "layer 3"),
        (fw.PrefixTuning(length=2, layers=(-4,)), {}, "layer -4"),
        (fw.PrefixTuning(length=2, layers=()), {}, "layers"),
        (fw.PrefixTuning(length=2, layers="lower"), {}, "'lower'"),
        (fw.PrefixTuning(length=2, layers=1.5), {}, "1.5"),
        (fw.PrefixTuning(length=2, layers=("a",)), {}, "'a'"),
        (fw.PrefixTuning(length=2, attention="cross"), {}, "no cross attention"),
        (fw.PrefixTuning(length=2, attention="encoder"), {}, "no encoder attention"),
        (fw.PrefixTuning(length=2, attention="selves"), {}, "'selves'"),
    ],
)
def test_attach_refuses(model, method, kwargs, message):
    before = State.of(model)
    with pytest.raises(fw.ForewordError) as error:
        fw.attach(model, method, **kwargs)
    assert is_one_line(error.value)
    assert message in str(error.value)
    assert_unchanged(model, before)


def test_a_refused_adapter_leaves_the_others(model):
    shake(fw.attach(model, fw.PrefixTuning(length=4), name="a"))
    expected = logits(model)
    for method, name in [("zero-init", "a"), (fw.PrefixTuning(layers=9), "b"), ("zero-init", "update")]:
        with pytest.raises(fw.ForewordError) as error:
            fw.attach(model, method, name=name)
        assert is_one_line(error.value)
    assert fw.adapters(model) == ["a"]
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fw.PrefixTuning(length=0),
        lambda: fw.PrefixTuning(length=-3),
        lambda: fw.PrefixTuning(length=True),
        lambda: fw.PrefixTuning(length="4"),
        lambda: fw.PrefixTuning(hidden=0),
        lambda: fw.PrefixTuning(reparam="shred"),
        lambda: fw.PrefixTuning(init="zeros"),
        lambda: fw.PrefixTuning(dropout=1.5),
        lambda: fw.PrefixTuning(dropout=-0.1),
        lambda: fw.PrefixTuning(length=3, frozen_tokens=3),
        lambda: fw.PrefixTuning(reparam="shared", frozen_tokens=1),
        lambda: fw.DeepPrompt(init="zero"),
        lambda: fw.PromptTuning(length=2.0),
        lambda: fw.ZeroInit(opening=1.0),
        lambda: fw.ZeroInit(opening=float("nan")),
        lambda: fw.ZeroInitNonlinear(form="hypernetwork"),
        lambda: fw.RandomInit(length=None),
    ],
)
def test_a_method_refuses_a_value_at_once(make):
    with pytest.raises(fw.ForewordError) as error:
        make()
    assert is_one_line(error.value)


@pytest.mark.parametrize("call", [fw.detach, fw.set_active, lambda model, name: fw.rows(model, [name]).__enter__()])
def test_an_unknown_adapter(model, call):
    """On a model without adapters, and then with others."""
    before = State.of(model)
    with pytest.raises(fw.ForewordError, match="no adapter 'support'; it has none"):
        call(model, "support")
    assert_unchanged(model, before)
    fw.attach(model, "zero-init", name="billing")
    with pytest.raises(fw.ForewordError, match="no adapter 'support'; it has 'billing'"):
        call(model, "support")
    assert fw.adapters(model) == ["billing"]


def test_the_base_of_a_model_without_adapters(model):
    before = State.of(model)
    fw.set_active(model, None)
    with fw.rows(model, [None, None]):
        logits(model, text(batch=2))
    assert_unchanged(model, before)


def test_not_a_transformers_model():
    for other in (nn.Linear(2, 2), "smollm2", None):
        with pytest.raises(fw.ForewordError, match="is not a transformers model"):
            fw.attach(other, "zero-init")
