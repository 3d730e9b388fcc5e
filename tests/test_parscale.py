"""Parallel streams against a loop over separate runs, and everything that a user may do with them."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import DynamicCache

import foreword as fw
import tiny
import zoo
from conformance import close, left_padded, shake, text
from foreword.methods.parscale import start_from_prefix
from foreword.model.streams import Tiling, tile
from foreword.train import Training, train

LENGTH = 4
CPU = torch.device("cpu")


def make(streams=3, dtype=torch.float64, **fields):
    """A tiny llama whose streams are far from each other, and the adapter."""
    model = zoo.make("llama", dtype)
    adapter = fw.attach(model, fw.ParScale(streams, LENGTH, **fields))
    shake(adapter)
    return model, adapter


# ---------------------------------------------------------------------------------------------------------------------
# Against a naive loop


def naive(model, part, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of P separate runs, each with its prefix in a KV cache, joined by loops over streams and widths."""
    batch = len(ids)
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = []
    for stream in range(part.streams):
        cache = DynamicCache(config=model.config)
        for layer, module in enumerate(part.modules.values()):
            key, value = (x[stream].expand(batch, -1, -1, -1) for x in (module.source.key, module.source.value))
            cache.update(key, value, layer)
        whole = torch.cat([torch.ones(batch, LENGTH, dtype=mask.dtype), mask], dim=1)
        out = model.model(input_ids=ids, attention_mask=whole, position_ids=positions, past_key_values=cache)
        hidden.append(out.last_hidden_state)
    aggregator = part.aggregator
    width = hidden[0].shape[-1]
    interleaved = torch.stack([h[..., i] for i in range(width) for h in hidden], dim=-1)
    inner = interleaved @ aggregator.hidden.weight.T + aggregator.hidden.bias
    scores = (inner * torch.sigmoid(inner)) @ aggregator.scores.weight.T + aggregator.scores.bias
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    weights = 0.99 * weights + 0.01 / part.streams
    return model.lm_head(sum(weights[..., p, None] * hidden[p] for p in range(part.streams)))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_streams_are_separate_runs_joined(architecture):
    model = zoo.make(architecture, torch.float64)
    adapter = fw.attach(model, fw.ParScale(3, LENGTH))
    shake(adapter)
    ids = text()
    logits = model(ids, use_cache=False).logits
    logits.pow(2).mean().backward()
    gradients = {name: p.grad.clone() for name, p in adapter.named_parameters().items()}
    fw.set_active(model, None)
    model.zero_grad()
    expected = naive(model, adapter.parts[0], ids)
    close(logits, expected, 1e-9)
    expected.pow(2).mean().backward()
    for name, parameter in adapter.named_parameters().items():
        assert parameter.grad.abs().max() > 0
        close(gradients[name], parameter.grad, 1e-9)


@torch.no_grad()
def test_prompts_of_different_lengths():
    model, adapter = make()
    ids = text()
    padded, mask = left_padded(ids, [0, 2, 3])
    logits = model(padded, attention_mask=mask, use_cache=False).logits
    fw.set_active(model, None)
    expected = naive(model, adapter.parts[0], padded, mask)
    for row, pads in enumerate([0, 2, 3]):
        close(logits[row, pads:], expected[row, pads:], 1e-9)


@torch.no_grad()
def test_order_of_streams_does_not_matter_but_their_prefixes_do():
    model, adapter = make(streams=2)
    ids = text()
    expected = model(ids).logits
    sources = [module.source for module in adapter.parts[0].modules.values()]
    for source in sources:
        source.fit(source.key.flip(0), source.value.flip(0))
    assert (model(ids).logits - expected).abs().max() > 0.1
    aggregator = adapter.parts[0].aggregator
    by_stream = aggregator.hidden.weight.unflatten(1, (-1, 2))  # column i·P + p reads h_p[i]
    aggregator.hidden.weight.copy_(by_stream.flip(-1).flatten(1))
    aggregator.scores.weight.copy_(aggregator.scores.weight.flip(0))
    aggregator.scores.bias.copy_(aggregator.scores.bias.flip(0))
    close(model(ids).logits, expected, 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# The number of streams


@torch.no_grad()
def test_one_stream_is_the_base():
    model = zoo.make("llama")
    ids = text()
    expected = model(ids).logits
    adapter = fw.attach(model, fw.ParScale((1, 2), LENGTH))
    assert not torch.equal(model(ids).logits, expected)
    fw.set_streams(model, 1)
    assert torch.equal(model(ids).logits, expected)
    assert adapter.parts[0].trainable() == []


@torch.no_grad()
def test_sets_are_adapters_of_their_own():
    """Each P of one adapter gives what an adapter with that P alone gives."""
    model, adapter = make((1, 2, 4))
    ids = text()
    fw.set_streams(model, 2)
    two = model(ids).logits
    fw.set_streams(model, 4)
    four = model(ids).logits
    fw.set_streams(model, None)
    assert torch.equal(model(ids).logits, four)
    for index, (size, expected) in enumerate({2: two, 4: four}.items(), 1):
        alone = zoo.make("llama", torch.float64)
        single = fw.attach(alone, fw.ParScale(size, LENGTH))
        for name, tensor in single.state_dict().items():
            tensor.copy_(adapter.state_dict()[name.replace("0", str(index), 1)])
        close(alone(ids).logits, expected, 1e-12)


def test_a_missing_set_is_named():
    model, _ = make((2, 4))
    with pytest.raises(fw.ForewordError, match=r"no set of 3 streams; it has sets of 2, 4"):
        fw.set_streams(model, 3)
    with pytest.raises(fw.ForewordError, match=r"no set of 1 streams"):
        fw.set_streams(model, 1)
    with pytest.raises(fw.ForewordError, match=r"no set of 3"), fw.rows(model, ["default"], streams=[3]):
        pass
    with (
        pytest.raises(fw.ForewordError, match="2 adapters and 1 numbers"),
        fw.rows(model, ["default"] * 2, streams=[2]),
    ):
        pass
    fw.attach(model, fw.PrefixTuning(LENGTH), name="other")
    with pytest.raises(fw.ForewordError, match="'other' has no parallel streams"):
        fw.set_streams(model, 2)
    with pytest.raises(fw.ForewordError, match="the model has none"):
        fw.set_streams(zoo.make("llama"), 2)


@pytest.mark.parametrize("streams", [0, -1, (), (2, 2), True, (2, 0), 1.5])
def test_impossible_numbers_of_streams(streams):
    with pytest.raises(fw.ForewordError, match="streams must be"):
        fw.ParScale(streams)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_rows_with_different_numbers_of_streams(dtype, tolerance):
    model, _ = make((1, 2, 3), dtype)
    other = fw.attach(model, fw.PrefixTuning(LENGTH), name="other")
    shake(other, seed=5)
    ids = text(batch=5)
    names = ["default", "other", "default", None, "default"]
    sizes = [3, None, 1, None, 2]
    expected, beams = [], []
    for row, (name, size) in enumerate(zip(names, sizes, strict=True)):
        fw.set_active(model, name)
        if size is not None:
            fw.set_streams(model, size)
        expected.append(model(ids[row : row + 1]).logits[0])
        beams.append(generate(model, ids[row : row + 1], num_beams=3)[0])
    with fw.rows(model, names, streams=sizes):
        close(model(ids).logits, torch.stack(expected), tolerance)
        assert torch.equal(generate(model, ids, num_beams=3), torch.stack(beams))


def test_in_training_the_sets_take_turns():
    model, adapter = make((1, 2, 4))
    model.train()
    seen = []
    for _ in range(4):
        model.zero_grad()
        model(text()).logits.pow(2).mean().backward()
        seen.append([part.streams for part in adapter.parts if any(p.grad is not None for p in part.trainable())])
    assert seen == [[2], [4], [2], [4]]
    fw.set_streams(model, 2)
    model.zero_grad()
    model(text()).logits.pow(2).mean().backward()
    assert all(p.grad is None for p in adapter.parts[2].trainable())


@torch.no_grad()
def test_a_cache_keeps_its_number_of_streams():
    model, _ = make((1, 2))
    ids = text()
    cache = model(ids).past_key_values
    assert cache.get_seq_length() == ids.shape[1]
    assert cache.layers[0].keys.shape[0] == 2 * len(ids)
    fw.set_streams(model, 1)
    with pytest.raises(fw.ForewordError, match="cache holds P"):
        model(ids[:, :1], past_key_values=cache)


# ---------------------------------------------------------------------------------------------------------------------
# Every way in


def generate(model, ids: Tensor, mask: Tensor | None = None, **settings) -> Tensor:
    """The new tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"max_new_tokens": 5, "do_sample": False, **settings}
    return model.generate(input_ids=ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


@torch.no_grad()
def test_samples_of_a_prompt_and_prompt_lookup():
    model, _ = make()
    ids = text(batch=2)
    torch.manual_seed(0)
    cached = generate(model, ids, do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    assert torch.equal(cached, generate(model, ids, do_sample=True, num_return_sequences=3, use_cache=False))
    assert cached.shape == (6, 5)
    one = torch.cat([ids[:1], ids[:1, 1:]], dim=1)
    assert torch.equal(generate(model, one, prompt_lookup_num_tokens=3), generate(model, one))


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
def test_embeddings_and_ready_made_masks(batch):
    model, _ = make()
    ids = text(batch)
    expected = model(ids).logits
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected, 1e-12)
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    for rows in {1, batch}:
        mask = seen.expand(rows, 1, -1, -1)
        close(model(ids, attention_mask=mask).logits, expected, 1e-12)
        arguments = {"attention_mask": {"full_attention": mask, "sliding_attention": None}}
        tile((2,) * batch, CPU).repeat(arguments)
        assert arguments["attention_mask"]["sliding_attention"] is None
        assert len(arguments["attention_mask"]["full_attention"]) in (1, 2 * batch)
    close(model(ids, position_ids=torch.arange(ids.shape[1])[None]).logits, expected, 1e-12)


@torch.no_grad()
def test_outputs_have_the_rows_of_the_user():
    model, _ = make()
    ids = text()
    out = model(ids, labels=ids)
    assert out.loss.dim() == 0
    assert out.logits.shape[:2] == ids.shape
    assert model(ids, logits_to_keep=2).logits.shape[:2] == (3, 2)
    assert model.model(ids, return_dict=False)[0].shape == (*ids.shape, 32)


@torch.no_grad()
def test_a_classification_head():
    torch.manual_seed(0)
    config = hf.LlamaConfig(**zoo.COMMON, num_labels=4)
    model = hf.LlamaForSequenceClassification(config).eval()
    fw.attach(model, fw.ParScale(3, LENGTH))
    assert model(text()).logits.shape == (3, 4)


def test_packed_rows_are_refused():
    model, _ = make()
    with pytest.raises(fw.ForewordError, match="packed"):
        model(text(1), cu_seq_lens_q=torch.tensor([0, 3, 7]))


def test_block_masks_follow_their_rows():
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    first = torch.tensor([0, 2, 5])  # real token of each row

    def causal_behind(b, h, q, k):
        return (k <= q) & (k >= first[b])

    tiling = Tiling((2, 1, 3), CPU)
    mask = create_block_mask(causal_behind, B=3, H=None, Q_LEN=128, KV_LEN=128, device="cpu")
    arguments = {"attention_mask": mask}
    tiling.repeat(arguments)
    repeated = arguments["attention_mask"]
    assert repeated.shape[0] == 6
    dense = create_mask(repeated.mask_mod, 6, 1, 16, 16, device="cpu")
    expected = create_mask(causal_behind, 3, 1, 16, 16, device="cpu")
    assert torch.equal(dense, expected[tiling.source])


def test_reordering_keeps_streams_with_their_rows():
    tiling = Tiling((2, 2, 3), CPU)
    assert tiling.rows == (0, 1, 2, 0, 1, 2, 2)
    assert tiling.reorder(torch.tensor([1, 0, 2])).tolist() == [1, 0, 2, 4, 3, 5, 6]
    assert tile((1, 1), CPU) is None


# ---------------------------------------------------------------------------------------------------------------------
# Sources, settings, stages


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
@torch.no_grad()
def test_each_stream_starts_as_its_piece_of_the_text(architecture):
    """With an aggregator that weighs all streams alike, the answer is the mean of the base's on [piece; text]."""
    model = zoo.make(architecture, torch.float64)
    ids, pieces = text(length=1), text(batch=2, length=LENGTH, seed=8)
    hidden = []
    for piece in pieces:
        whole = torch.cat([piece.expand(len(ids), -1), ids], dim=1)
        hidden.append(model.base_model(whole, use_cache=False).last_hidden_state[:, LENGTH:])
    for reparam in (None, "per-layer"):
        adapter = fw.attach(model, fw.ParScale(2, LENGTH, reparam), init_ids=pieces)
        adapter.parts[0].aggregator.scores.weight.zero_()
        close(model.base_model(ids, use_cache=False).last_hidden_state, sum(hidden) / 2, 1e-5)
        fw.detach(model, "default")


@pytest.mark.parametrize("init", ["text", "normal"])
@pytest.mark.parametrize("reparam", [None, "per-layer"])
def test_counts(init, reparam):
    model = zoo.make("llama")
    method = fw.ParScale((1, 2, 4), LENGTH, reparam, hidden=16, init=init)
    adapter = fw.attach(model, method)
    assert method.count(adapter.host.layout).trainable == adapter.num_trainable
    assert method.count(adapter.host.layout).stored == adapter.num_stored
    adapter.fold()
    assert adapter.num_trainable == adapter.num_stored


def test_parameters_per_stream_of_the_papers_family():
    """P·(H² + 433·H + 1) + H for 36 layers, keys of width H/8 and 48 tokens (the counts in their parametric_fit.py)."""
    config = hf.Qwen2Config(
        vocab_size=8,
        hidden_size=128,
        intermediate_size=8,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
    )
    adapter = fw.attach(hf.Qwen2ForCausalLM(config), fw.ParScale(4))
    assert adapter.num_trainable == 4 * (128**2 + 433 * 128 + 1) + 128


def test_training_everything_gives_the_base_back():
    model = zoo.make("llama")
    ids = text()
    expected = model(ids).logits.detach()
    adapter = fw.attach(model, fw.ParScale(2, LENGTH, base="full"))
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.requires_grad
    assert adapter.num_trainable == fw.ParScale(2, LENGTH, base="full").count(adapter.host.layout).trainable
    optimizer = torch.optim.SGD(adapter.trainable_parameters, lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    fw.detach(model, "default")
    assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("reparam", [None, "per-layer"])
def test_the_second_stage_starts_where_the_first_ended(reparam):
    model = zoo.make("llama", torch.float64)
    prefix = fw.attach(model, fw.PrefixTuning(LENGTH), name="first")
    shake(prefix)
    ids = text()
    expected = model(ids).logits
    adapter = fw.attach(model, fw.ParScale((2, 4), LENGTH, reparam))
    start_from_prefix(adapter, prefix, noise=0.0)
    for size in (2, 4):
        fw.set_streams(model, size)
        close(model(ids).logits, expected, 1e-6)
    start_from_prefix(adapter, prefix)
    keys = adapter.parts[0].sites and next(iter(adapter.parts[0].modules.values())).source.every()[0]
    assert (keys[0] - keys[1]).abs().min() > 0
    short = fw.attach(model, fw.ParScale(2, LENGTH - 1), name="short")
    with pytest.raises(fw.ForewordError, match="4 prefix tokens, the streams 3"):
        start_from_prefix(short, prefix)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize(
    "other", [fw.PrefixTuning(3), fw.ZeroInit(3, layers=None, opening=0.5), fw.ParallelAdapter(4), fw.Lora(2)]
)
def test_streams_compose(other, dtype, tolerance):
    """Beside another method, rows can differ in P, and one stream is the other method alone."""
    model = zoo.make("llama", dtype)
    adapter = fw.attach(model, [fw.ParScale((1, 2), LENGTH), other])
    shake(adapter)
    ids = text(batch=2)
    expected = []
    for size in (1, 2):
        fw.set_streams(model, size)
        expected.append(model(ids[size - 1 :][:1]).logits[0])
    with fw.rows(model, ["default"] * 2, streams=[1, 2]):
        close(model(ids).logits, torch.stack(expected), tolerance)
    numbers = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    fw.detach(model, "default")
    alone = fw.attach(model, other)
    for name, tensor in alone.state_dict().items():
        tensor.copy_(numbers[name.replace("0", "2", 1)])
    close(model(ids[:1]).logits[0], expected[0], tolerance)


def test_training_with_trl(tmp_path):
    from datasets import Dataset

    model, tokenizer = tiny.model(), tiny.tokenizer()
    data = Dataset.from_list(tiny.rows())
    settings = Training(str(tmp_path / "out"), max_steps=6, learning_rate=3e-3, logging_steps=1, save_strategy="no")
    result = train(model, tokenizer, fw.ParScale((2, 3), LENGTH), data, settings, eval_data=data)
    assert any("eval_loss" in line for line in result.history)
    start = fw.attach(tiny.model(), fw.ParScale((2, 3), LENGTH), init_ids=range(3, 40))
    for before, after in zip(start.parts, result.adapter.parts, strict=True):  # each set had its turns
        assert not torch.equal(before.aggregator.scores.weight, after.aggregator.scores.weight)
    fresh = tiny.model()
    fw.load(fresh, tmp_path / "out")
    ids = text()
    assert torch.equal(fresh(ids).logits, model(ids).logits)


def test_what_inference_mode_laid_out_serves_training():
    model, _ = make((2, 5), torch.float32)
    with torch.inference_mode(), fw.rows(model, ["default"] * 3, streams=[5, 2, 5]):
        model(text())
    with fw.rows(model, ["default"] * 3, streams=[5, 2, 5]):
        model(text()).logits.sum().backward()
