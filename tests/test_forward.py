"""What a forward and a generation read: dtypes, masks, windows, and the numbers as they are now."""

import copy

import pytest
import torch
import transformers as hf
from transformers import DynamicCache, StaticCache

import foreword as fw
import zoo
from conformance import close, shake, small, text
from foreword.sources.mlp import Reparameterization
from surroundings import attach_or_skip

METHODS = list(fw.methods())
OF_THE_BASE = {"full", "bitfit"}  # their parameters are the model's own
LENGTH = 4


@pytest.fixture
def model():
    return zoo.make("llama")


@pytest.fixture
def adapter(model):
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH))
    shake(adapter)
    return adapter


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_stay_in_full_precision_beside_a_half_precision_model(method, dtype):
    model = zoo.make("llama", dtype)
    adapter = attach_or_skip(model, small(method))
    shake(adapter)
    logits = model(text()).logits
    assert logits.dtype == dtype
    logits.float().pow(2).mean().backward()
    expected = dtype if method in OF_THE_BASE else torch.float32
    for name, parameter in adapter.named_parameters().items():
        assert parameter.dtype == expected, name
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all(), name
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == dtype


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_a_half_precision_model_is_near_the_full_one(method):
    """The softmax is taken in fp32: an error of rounding, not more."""
    whole, half = zoo.make("llama"), zoo.make("llama", torch.bfloat16)
    whole.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    adapter = attach_or_skip(whole, small(method))
    shake(adapter)
    twin = fw.attach(half, small(method)).state_dict()
    for name, tensor in adapter.state_dict().items():
        twin[name].copy_(tensor)
    with_adapter = half(text()).logits.float() - whole(text()).logits
    fw.set_active(whole, None)
    fw.set_active(half, None)
    without = half(text()).logits.float() - whole(text()).logits
    assert with_adapter.abs().mean() < 3 * without.abs().mean()


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_is_cast_afterwards(method):
    model = zoo.make("llama")
    shake(attach_or_skip(model, small(method)))
    expected = model(text()).logits
    model.to(torch.float64)
    actual = model(text()).logits
    assert actual.dtype == torch.float64
    close(actual.float(), expected, 1e-3)
    model.to(torch.bfloat16)
    assert torch.isfinite(model(text()).logits).all()


def test_double_precision_all_the_way():
    model = zoo.make("llama", torch.float64)
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH, reparam="shared", hidden=8))
    assert {parameter.dtype for parameter in adapter.trainable_parameters} == {torch.float64}


# ---------------------------------------------------------------------------------------------------------------------
# Masks and windows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fully_masked_rows_are_finite(method, implementation, dtype):
    """A row of nothing but padding: finite logits and gradients, and the other rows as they are alone."""
    model = zoo.make("llama", dtype)
    model.set_attn_implementation(implementation)
    adapter = attach_or_skip(model, small(method))
    shake(adapter)
    ids = text()
    mask = torch.ones_like(ids)
    mask[1] = 0
    logits = model(ids, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    logits.float().pow(2).mean().backward()
    for name, parameter in adapter.named_parameters().items():
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all(), name
    alone = model(ids[::2], attention_mask=mask[::2]).logits
    close(logits[::2].float(), alone.float(), 1e-4 if dtype == torch.float32 else 0.2)


@torch.no_grad()
def test_a_row_without_tokens_reads_the_prefix_alone(model, adapter):
    """With every token masked, the joint softmax is the prefix's own."""
    ids = text(batch=1)
    nothing = torch.full((1, 1, ids.shape[1], ids.shape[1]), torch.finfo(torch.float32).min)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(ids, attention_mask=nothing)
    values = adapter.state_dict()["0.self.0.source.value"]  # (G, l, D)
    heads = seen[0].view(1, -1, 4, 8)
    for head in range(4):
        spans = torch.linalg.lstsq(values[head // 2].T, heads[0, :, head].T).solution  # (l, T): the weights of the mean
        close(spans.sum(0), torch.ones(ids.shape[1]))
        assert (spans > -1e-4).all()


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_a_sliding_window_never_evicts_the_prefix(architecture):
    """In one layer with a window of w, a late token reads the prefix and the last w tokens, and nothing else."""
    window = 6
    sizes = {**zoo.COMMON, "num_hidden_layers": 1}
    windowed = {"sliding_window": window, "head_dim": 8, "layer_types": ["sliding_attention"]}
    torch.manual_seed(0)
    model = {
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**sizes, sliding_window=window)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, **windowed)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, **windowed)),
        "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**sizes, **zoo.EXPERTS, **windowed)),
    }[architecture]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = text(batch=2, length=20)
    base = model(ids).logits
    shake(fw.attach(model, fw.PrefixTuning(length=LENGTH)))
    logits = model(ids).logits
    assert ((logits - base).abs().amax((0, 2)) > 1e-3).all()
    last = torch.arange(20 - window, 20)[None]
    close(logits[:, -1], model(ids[:, -window:], position_ids=last).logits[:, -1])

    cache = DynamicCache(config=model.config)  # keeps a window of tokens
    steps = [model(ids[:, :9], past_key_values=cache).logits]
    steps += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(9, 20)]
    close(torch.cat(steps, dim=1), logits)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_autocast(model, method):
    """bf16 products around fp32 parameters, as `Trainer(bf16=True)` runs them."""
    shake(attach_or_skip(model, small(method)))
    expected = model(text()).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = model(text()).logits
    assert (actual.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


@torch.no_grad()
def test_embeddings_instead_of_ids(model, adapter):
    ids = text()
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


@torch.no_grad()
def test_the_eager_implementation_and_its_weights(model, adapter):
    expected = model(text()).logits
    model.set_attn_implementation("eager")
    fw.detach(model, "default")
    shake(fw.attach(model, fw.PrefixTuning(length=LENGTH)))
    out = model(text(), output_attentions=True)
    close(out.logits, expected)
    assert [weights.shape for weights in out.attentions] == [(3, 4, 7, 7)] * 3


# ---------------------------------------------------------------------------------------------------------------------
# The numbers as they are now


def edit(adapter, seed):
    """Change every parameter through `.data`, which leaves no trace in its version."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter.trainable_parameters:
        parameter.data.add_(0.5 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grad", [False, True])
def test_edits_between_forwards_are_seen(model, method, grad):
    adapter = attach_or_skip(model, small(method))
    shake(adapter)
    twin = copy.deepcopy(adapter)
    with torch.set_grad_enabled(grad):
        first = model(text()).logits
        edit(adapter, seed=1)
        second = model(text()).logits
        assert not torch.equal(first, second)
        edit(twin, seed=1)
        assert torch.equal(twin.model(text()).logits, second)


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=32),
}


def generate(model, ids, **kwargs):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **kwargs)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("method", ["prefix-tuning", "zero-init", "prompt-tuning", "deep-prompt"])
def test_a_generation_leaves_nothing_to_the_next(model, kind, method):
    """With a cache that is reset and used again: after an edit, with another adapter, with the base."""
    ids = text()
    first = fw.attach(model, small(method), name="first")
    second = fw.attach(model, small(method), name="second")
    shake(first, std=1.0)
    shake(second, seed=7, std=1.0)
    cache = CACHES[kind](model)

    def reused():
        out = generate(model, ids, past_key_values=cache)
        if kind == "static":
            cache.reset()
        else:
            cache.crop(-cache.get_seq_length())
        return out

    outs = []
    for step in range(4):
        fw.set_active(model, [None, "first", "second", "first"][step])
        if step == 3:
            edit(first, seed=3)
        outs.append(reused())
        assert torch.equal(outs[-1], generate(model, ids)), step
    assert len({tuple(out.flatten().tolist()) for out in outs}) > 2


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("method", METHODS)
def test_a_second_turn_reads_the_adapter_as_it_is(model, kind, method):
    """Continuing a conversation on its cache after the adapter has changed: the new tokens read the new numbers."""
    ids, more = text(), text(seed=6)[:, :3]
    adapter = attach_or_skip(model, small(method))
    shake(adapter)
    cache = CACHES[kind](model)
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache)
    edit(adapter, seed=4)
    twin, twin_cache = copy.deepcopy((adapter, cache))  # which has never computed anything
    expected = twin.model(more, past_key_values=twin_cache).logits
    assert torch.equal(model(more, past_key_values=cache).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_an_adapter_takes_over_a_cache_that_the_base_has_filled(model, kind):
    """The text read so far keeps the base's keys; what follows reads the prefix, in one step or one by one."""
    ids, more = text(), text(seed=6)
    shake(fw.attach(model, fw.PrefixTuning(length=LENGTH)))
    at_once, one_by_one = CACHES[kind](model), CACHES[kind](model)
    fw.set_active(model, None)
    for cache in (at_once, one_by_one):
        base = model(ids, past_key_values=cache).logits
    fw.set_active(model, "default")
    expected = model(more, past_key_values=at_once).logits
    steps = [model(more[:, step : step + 1], past_key_values=one_by_one).logits for step in range(more.shape[1])]
    close(torch.cat(steps, dim=1), expected)
    assert (model(ids).logits - base).abs().max() > 1e-2


@pytest.mark.parametrize("reparam", ["shared", "per-layer"])
def test_a_reparameterisation_runs_once_a_forward_and_once_a_generation(model, reparam):
    """On the l rows of its embedding, whatever the batch."""
    fw.attach(model, fw.PrefixTuning(length=LENGTH, reparam=reparam, hidden=8))
    rows = []
    for module in model.modules():
        if isinstance(module, Reparameterization):
            module.down.register_forward_hook(lambda _, inputs, out: rows.append(inputs[0].shape[0]))
    once = [LENGTH] * (1 if reparam == "shared" else 3)
    ids = text(batch=6)
    model(ids).logits.sum().backward()
    assert rows == once
    rows.clear()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert rows == once


def test_reentrant_checkpointing_is_refused(model):
    """It would run each layer again in a backward of its own, and lose what layers share: silently, for a prompt."""
    fw.attach(model, fw.PromptTuning(length=LENGTH))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with torch.no_grad():
        model.train()(text())
    with pytest.raises(fw.ForewordError, match="use_reentrant=True loses gradients"):
        model(text())
    model.gradient_checkpointing_enable()
    model(text(), use_cache=False).logits.sum().backward()


@torch.no_grad()
def test_folding_in_the_middle_of_a_generation(model):
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH, reparam="shared", hidden=8))
    shake(adapter)
    ids, cache = text(), DynamicCache()
    expected = model(ids).logits
    start = model(ids[:, :4], past_key_values=cache).logits
    adapter.fold()
    close(torch.cat([start, model(ids[:, 4:], past_key_values=cache).logits], dim=1), expected)


def test_gradients_flow_through_a_cache(model, adapter):
    """A training step over a cached prefix of the text, as in truncated backpropagation."""
    ids, cache = text(), DynamicCache()
    model(ids[:, :4], past_key_values=cache)
    model(ids[:, 4:], past_key_values=cache).logits.pow(2).mean().backward()
    cached = [parameter.grad.clone() for parameter in adapter.trainable_parameters]
    model.zero_grad()
    model(ids).logits[:, 4:].pow(2).mean().backward()
    for parameter, gradient in zip(adapter.trainable_parameters, cached, strict=True):
        close(gradient, parameter.grad)
