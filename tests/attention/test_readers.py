"""Which path each architecture takes, and that the paths and the ways to put prefixes together agree."""

import copy
import logging

import pytest
import torch
from transformers import StaticCache

import foreword as fw
import tiny
import zoo
from conformance import close, make_case, shake, small, text
from foreword.attention import readers, stack
from foreword.attention.readers import watch_paths
from foreword.model.slot import Prefix

REFERENCE = {
    "gemma2": "soft-capped",
    "gpt_oss": "sinks",
    "t5": "bias",
    "deepseek_v3": "keys have width",
}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "mixtral", "bart", "bert", *REFERENCE])
def test_path_of_each_site(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    case = make_case(architecture, small("prefix-tuning"))
    with watch_paths() as paths, caplog.at_level(logging.DEBUG, "foreword"), torch.no_grad():
        case.model(**case.inputs(text()))
    assert len(paths) == len(case.adapter.parts[0].modules)
    reason = REFERENCE.get(architecture)
    for path in paths.values():
        assert path == "fused" if reason is None else path.startswith("reference: ") and reason in path
    assert ("takes the reference path" in caplog.text) == (reason is not None)


def test_a_softmax_of_its_own_is_fused_whatever_the_tokens_are() -> None:
    for architecture in ("gpt_oss", "t5"):
        case = make_case(architecture, small("zero-init"))
        with watch_paths() as paths, torch.no_grad():
            case.model(**case.inputs(text()))
        assert set(paths.values()) == {"fused"}


def test_dropout_of_attention_weights_takes_the_reference_path() -> None:
    case = make_case("llama", small("prefix-tuning"))
    for layer in case.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    case.model.train()
    with watch_paths() as paths:
        case.logits(text())
    assert all("dropped" in path for path in paths.values())


def test_half_precision_trains_by_the_kernels_own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's is slow there. In training only; and the gradients are those of a model without it, up to bf16."""
    calls, token_attention = [], readers.token_attention
    monkeypatch.setattr(readers, "token_attention", lambda *a, **k: calls.append(1) or token_attention(*a, **k))
    gradients = {}
    for dtype, bound in ((torch.float64, 0), (torch.bfloat16, 2**17), (torch.bfloat16, 0)):
        monkeypatch.setattr(readers.FlashCPU, "small", bound)
        model = tiny.model().to(dtype)
        adapter = fw.attach(model, fw.ZeroInit(length=4, layers=None))
        for seed, parameter in enumerate(adapter.trainable_parameters):  # the same in every dtype
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        padded = torch.ones_like(text())
        padded[0, :3] = 0
        calls.clear()
        with torch.no_grad():
            model(text(), attention_mask=padded)
        assert not calls
        model(text(), attention_mask=padded, labels=text()).loss.backward()
        assert len(calls) == (len(model.model.layers) - 1 if bound else 0)  # nothing learns below the lowest layer's
        gradients[dtype, bound] = torch.cat([p.grad.double().flatten() for p in adapter.trainable_parameters])
    exact, ours, theirs = gradients.values()
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm() < 0.1 * exact.norm()


COMPOSED = [
    fw.PrefixTuning(length=3),
    fw.PrefixTuning(length=4),
    fw.ZeroInit(length=2, layers=None),
    fw.ZeroInit(length=5, layers=1),
    fw.Point(fw.sources.Direct(3, "normal"), fw.combines.Ungated()),
]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bart", "mistral-window", "qwen3-wide-heads"])
@pytest.mark.parametrize("names", [None, ["one", None, "two"], ["two", "one", "one"], ["three", "two", "one"]])
def test_fused_and_reference_agree(architecture: str, names: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prefixes in one adapter and another adapter in each row: outputs and every gradient, in float64."""
    model = zoo.make(architecture, torch.float64)
    methods = {"one": COMPOSED, "two": COMPOSED[1:3], "three": COMPOSED[4:]}
    for seed, (name, method) in enumerate(methods.items()):
        shake(fw.attach(model, method, name), seed)
    fw.set_active(model, "one")
    ids = text()
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})

    def run() -> list[torch.Tensor]:
        leaves = [p for name in methods for p in model.foreword.adapters[name].trainable_parameters]
        if names is None:
            logits = model(**inputs).logits
        else:
            with fw.rows(model, names):
                logits = model(**inputs).logits
        grads = torch.autograd.grad(logits.square().mean(), leaves, allow_unused=True)
        return [logits, *(torch.zeros(()) if grad is None else grad for grad in grads)]

    with watch_paths() as paths:
        fused = run()
    assert set(paths.values()) == {"fused"}
    monkeypatch.setattr(readers, "_obstacle", lambda *arguments: "this test")
    for one, other in zip(fused, run(), strict=True):
        close(one, other, 1e-9)


@torch.no_grad()
def test_many_tenants_in_one_batch() -> None:
    """32 rows with adapters of different lengths generate what each generates alone."""
    model = zoo.make("llama", torch.float64)
    names: list[str | None] = [None]
    for seed in range(31):
        names.append(f"tenant{seed}")
        method = (
            fw.ZeroInit(length=3 + seed % 4, layers=None) if seed % 3 == 0 else fw.PrefixTuning(length=1 + seed % 5)
        )
        shake(fw.attach(model, method, names[-1]), seed)
    ids = text(batch=32)
    with fw.rows(model, names):
        together = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    for row, name in enumerate(names):
        fw.set_active(model, name)
        alone = model.generate(
            input_ids=ids[row : row + 1], attention_mask=torch.ones(1, ids.shape[1]), max_new_tokens=4, do_sample=False
        )
        assert torch.equal(together[row], alone[0]), name


def test_a_generation_puts_its_prefixes_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.make("llama")
    for name in ("one", "two"):
        fw.attach(model, small("zero-init"), name)
    whole, calls = Prefix.piece, []
    monkeypatch.setattr(Prefix, "piece", lambda self, *a: calls.append(self) or whole(self, *a))
    for names in (["one", None, "two"], ["two"]):
        calls.clear()
        with fw.rows(model, names):
            model.generate(input_ids=text(batch=3), max_new_tokens=4, do_sample=False)
        assert len(calls) == len(set(calls)) > 0


def test_rows_of_a_generation_serve_a_training_step() -> None:
    """What was made in inference mode does not end up in autograd."""
    case = make_case("llama", small("prefix-tuning"))
    with fw.rows(case.model, [None, "default", None]):
        with torch.inference_mode():
            case.logits(text())
        case.logits(text()).sum().backward()
    assert all(parameter.grad is not None for parameter in case.adapter.trainable_parameters)


@torch.no_grad()
def test_long_prefixes_are_not_copied_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.make("llama")
    for seed, name in enumerate(("one", "two")):
        shake(fw.attach(model, small("prefix-tuning"), name), seed)
    with fw.rows(model, ["one", None, "two"]):
        copied = model(input_ids=text()).logits
        monkeypatch.setattr(stack, "COPIED", 100)
        with watch_paths() as paths:
            close(model(input_ids=text()).logits, copied)
    assert all("too long to copy" in path for path in paths.values())
    with watch_paths() as paths:
        model(input_ids=text())
    assert set(paths.values()) == {"fused"}  # all rows read one prefix


@torch.no_grad()
def test_another_assignment_of_the_same_adapters_to_a_running_cache() -> None:
    """What a generation keeps for its rows is not read when the rows change hands."""
    model = zoo.make("llama")
    for seed, name in enumerate(("one", "two")):
        shake(fw.attach(model, small("prefix-tuning"), name), seed)
    ids, more = text(batch=2), text(batch=2, length=1, seed=8)

    def second_logits(first: list[str], second: list[str]) -> torch.Tensor:
        with fw.rows(model, first):
            cache = model(input_ids=ids, use_cache=True).past_key_values
        with fw.rows(model, second):
            return model(input_ids=more, past_key_values=cache).logits

    swapped = second_logits(["one", "two"], ["two", "one"])
    with fw.rows(model, ["one", "two"]):
        cache = model(input_ids=ids, use_cache=True).past_key_values
    model.foreword._memories.clear()
    with fw.rows(model, ["two", "one"]):
        close(swapped, model(input_ids=more, past_key_values=cache).logits)


@torch.no_grad()
def test_a_gate_of_other_rows_of_a_running_cache() -> None:
    """A row that begins to read an adapter in the middle gets a gate of its own, not that of the row before it."""
    model = zoo.make("llama")
    shake(fw.attach(model, small("unipelt"), "one"))
    ids, more = text(batch=2), text(batch=2, length=1, seed=8)
    with fw.rows(model, ["one", None]):
        cache = model(input_ids=ids, use_cache=True).past_key_values
    twin = copy.deepcopy(cache)
    with fw.rows(model, [None, "one"]):
        swapped = model(input_ids=more, past_key_values=cache).logits
        model.foreword.forget()
        close(swapped, model(input_ids=more, past_key_values=twin).logits)


@torch.no_grad()
def test_an_adapter_that_comes_under_an_old_name_in_the_middle_of_a_generation() -> None:
    model = zoo.make("llama")
    ids, more = text(batch=1), text(batch=1, length=1, seed=8)
    fw.attach(model, small("prefix-tuning"), "stays")
    shake(fw.attach(model, small("prefix-tuning"), "goes"), 1)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    model(input_ids=more, past_key_values=cache)
    fw.detach(model, "goes")
    shake(fw.attach(model, small("prefix-tuning"), "goes"), 2)
    twin = copy.deepcopy(cache)
    after = model(input_ids=more, past_key_values=cache).logits
    close(after, model(input_ids=more, past_key_values=twin).logits)


@torch.no_grad()
def test_another_attention_function_in_the_middle_of_a_generation() -> None:
    """The path of a generation is chosen anew: eager attention gives its weights."""
    case = make_case("llama", small("prefix-tuning"))
    ids, more = text(batch=1), text(batch=1, length=1, seed=8)
    cache = case.model(input_ids=ids, use_cache=True).past_key_values
    expected = case.model(input_ids=more, past_key_values=copy.deepcopy(cache)).logits
    case.model(input_ids=more, past_key_values=copy.deepcopy(cache))
    case.model.set_attn_implementation("eager")
    outputs = case.model(input_ids=more, past_key_values=cache, output_attentions=True)
    close(outputs.logits, expected)
    assert all(weights is not None for weights in outputs.attentions)


@pytest.mark.parametrize("method", [fw.PrefixTuning(length=3), fw.ZeroInit(length=3, layers=None, opening=0.5)])
def test_gradients_of_each_example(method: fw.Method) -> None:
    """torch.func: the mean of vmap(grad) over examples is the gradient of the mean."""
    case, ids = make_case("llama", method), text(batch=4)
    parameters = {name: p.detach() for name, p in case.model.named_parameters() if p.requires_grad}

    def loss(parameters, ids):
        logits = torch.func.functional_call(case.model, parameters, (ids,), {"use_cache": False}).logits
        return logits.square().mean()

    whole = torch.func.grad(loss)(parameters, ids)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids[:, None])
    case.logits(ids).square().mean().backward()
    for name, parameter in case.model.named_parameters():
        if parameter.requires_grad:
            close(whole[name], parameter.grad)
            close(each[name].mean(0), parameter.grad)


@torch.no_grad()
def test_compiled_steps_of_decoding_on_a_static_cache() -> None:
    case, ids = make_case("llama", small("prefix-tuning")), text(batch=2)
    cache = StaticCache(config=case.model.config, max_cache_len=16)
    case.model(input_ids=ids[:, :-2], past_key_values=cache)
    compiled = torch.compile(case.model, backend="aot_eager")
    for place in (-2, -1):
        token = ids[:, place : ids.shape[1] + place + 1]
        close(compiled(input_ids=token, past_key_values=cache).logits[:, 0], case.logits(ids)[:, place])


@pytest.mark.parametrize("method", [fw.PrefixTuning(length=3), fw.ZeroInit(length=3, layers=None, opening=0.5)])
def test_a_compiled_layer_has_no_break(method: fw.Method) -> None:
    case = make_case("llama", method)
    layer, calls = case.model.model.layers[1], []
    handle = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    case.logits(text())
    handle.remove()
    (hidden, *args), kwargs = calls[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [hidden.detach().requires_grad_(), *layer.self_attn.foreword.parameters()]
    for run in (compiled, layer):
        out = run(leaves[0], *args, **kwargs)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        if run is compiled:
            expected = [out, *grads]
    for one, other in zip([out, *grads], expected, strict=True):
        close(one, other)
