"""One softmax over prefix and text: I1, I5, I13, I23."""

import naive
import pytest
import torch
from naive import DIM, GROUPS, HEADS, LAYERS, differs, exactly, key_values

import foreword as fw
from conformance import shake
from foreword.attention.merge import Scoring, attend, causal_mask, merge

LENGTH, TEXT = 5, 9
SCORING = Scoring(scaling=DIM**-0.5)


@pytest.fixture
def states():
    """q (B, H, T, D), k and v (B, G, T, D), prefix keys and values (1, G, l, D)."""
    draw = torch.Generator().manual_seed(4)
    shapes = [(2, HEADS, TEXT, DIM), *[(2, GROUPS, TEXT, DIM)] * 2, *[(1, GROUPS, LENGTH, DIM)] * 2]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def whole(q, k, v, prefix_k, prefix_v):
    """One softmax over the concatenation."""
    visible = naive.text_visible(TEXT, TEXT, None)
    return naive.attention(q, *naive.in_front((prefix_k[0], prefix_v[0]), k, v, visible))


def scores(q, k):
    return q @ k.repeat_interleave(HEADS // GROUPS, dim=1).mT / DIM**0.5


def test_i1_the_joint_softmax_interpolates(states):
    """softmax over [prefix; text] = (1 − λ) text + λ prefix, λ = σ(lse_p − lse_x), for every query and head."""
    q, k, v, prefix_k, prefix_v = states
    masked = scores(q, k).masked_fill(~causal_mask(TEXT, TEXT, q.device), -torch.inf)
    share = torch.sigmoid(scores(q, prefix_k).logsumexp(-1) - masked.logsumexp(-1))[..., None]
    everything = torch.ones(1, TEXT, LENGTH, dtype=torch.bool)
    text = naive.attention(q, k, v, naive.text_visible(TEXT, TEXT, None))
    prefix = naive.attention(q, prefix_k.expand(2, -1, -1, -1), prefix_v.expand(2, -1, -1, -1), everything)
    exactly((1 - share) * text + share * prefix, whole(*states))

    out, lse, _ = attend(q, k, v, SCORING, causal_mask(TEXT, TEXT, q.device))
    prefix_out, prefix_lse, _ = attend(q, prefix_k, prefix_v, SCORING)
    joined, joint_lse = merge(out, lse, prefix_out, prefix_lse)
    exactly(joined, whole(*states))
    exactly(joint_lse, torch.cat([scores(q, prefix_k), masked], dim=-1).logsumexp(-1))


@torch.no_grad()
def test_i1_in_every_layer(model, decoder, ids):
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH))
    shake(adapter)
    exactly(model(ids).logits, decoder(ids, key_values=key_values(adapter)))


def test_i5_zero_keys_and_values_damp_the_output(states):
    """K = V = 0 is not a no-op: it leaves Z/(Z + l) of every head's output."""
    q, k, v, prefix_k, prefix_v = states
    damped = whole(q, k, v, torch.zeros_like(prefix_k), torch.zeros_like(prefix_v))
    text = naive.attention(q, k, v, naive.text_visible(TEXT, TEXT, None))
    mass = scores(q, k).exp().tril().sum(-1, keepdim=True)  # Z
    exactly(damped, text * mass / (mass + LENGTH))

    out, lse, _ = attend(q, k, v, SCORING, causal_mask(TEXT, TEXT, q.device))
    prefix_out, prefix_lse, _ = attend(q, torch.zeros_like(prefix_k), torch.zeros_like(prefix_v), SCORING)
    exactly(merge(out, lse, prefix_out, prefix_lse)[0], damped)


@torch.no_grad()
def test_i5_init_zero_is_not_the_base(model, decoder, ids):
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH, init="zero"))
    assert all(not key.any() and not value.any() for key, value in key_values(adapter))
    logits = model(ids).logits
    exactly(logits, decoder(ids, key_values=key_values(adapter)))
    differs(logits, decoder(ids), by=0.1)


def test_i5_a_masked_prefix_is_no_prefix(states):
    """The real no-op is a prefix that no query sees."""
    q, k, v, prefix_k, prefix_v = states
    out, lse, _ = attend(q, k, v, SCORING, causal_mask(TEXT, TEXT, q.device))
    hidden = torch.zeros(TEXT, LENGTH, dtype=torch.bool)
    joined, joint_lse = merge(out, lse, *attend(q, prefix_k, prefix_v, SCORING, hidden)[:2])
    assert torch.equal(joined, out)
    assert torch.equal(joint_lse, lse)


@torch.no_grad()
def test_i13_duplicates_count_twice_in_a_joint_softmax(model, decoder, ids):
    """Every prefix token twice: the odds of λ double, so the output changes."""
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH))
    shake(adapter)
    once = model(ids).logits
    pairs = key_values(adapter)
    twice = fw.attach(model, fw.PrefixTuning(length=2 * LENGTH), name="twice")
    state = twice.state_dict()
    for layer, (key, value) in enumerate(pairs):
        state[f"0.self.{layer}.source.key"].copy_(torch.cat([key, key], dim=1))
        state[f"0.self.{layer}.source.value"].copy_(torch.cat([value, value], dim=1))
    differs(model(ids).logits, once)
    exactly(model(ids).logits, decoder(ids, key_values=key_values(twice)))


def test_i13_odds_double(states):
    q, k, v, prefix_k, prefix_v = states
    _, lse, _ = attend(q, k, v, SCORING)
    one = attend(q, prefix_k, prefix_v, SCORING)
    two = attend(q, torch.cat([prefix_k] * 2, dim=2), torch.cat([prefix_v] * 2, dim=2), SCORING)
    exactly(two[0], one[0])
    exactly((two[1] - lse).exp(), 2 * (one[1] - lse).exp(), 1e-8)


@torch.no_grad()
def test_i13_duplicates_change_nothing_behind_a_gate(model, ids):
    adapter = fw.attach(model, fw.ZeroInit(length=LENGTH, layers=2, opening=0.4))
    once = model(ids).logits
    twice = fw.attach(model, fw.ZeroInit(length=2 * LENGTH, layers=2, opening=0.4), name="twice")
    prompts = adapter.state_dict()
    for name, tensor in twice.state_dict().items():
        tensor.copy_(torch.cat([prompts[name]] * 2) if name.endswith("prompt") else prompts[name])
    exactly(model(ids).logits, once)


def test_i23_a_group_reads_one_prefix(states):
    """Stored for each of the G key/value heads = stored for each of the H query heads."""
    q, _, _, prefix_k, prefix_v = states
    repeated = [x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (prefix_k, prefix_v)]
    out, lse, _ = attend(q, prefix_k, prefix_v, SCORING)
    exactly(out, attend(q, *repeated, SCORING)[0])
    exactly(lse, attend(q, *repeated, SCORING)[1])
    differs(out, attend(q, *[x.repeat(1, HEADS // GROUPS, 1, 1) for x in (prefix_k, prefix_v)], SCORING)[0])


@torch.no_grad()
def test_i23_in_a_model(model, ids):
    """A multi-head twin whose key and value projections are repeated takes the repeated prefix."""
    twin = naive.llama(groups=HEADS)
    state = model.state_dict()
    for name in [name for name in state if "k_proj" in name or "v_proj" in name]:
        state[name] = state[name].unflatten(0, (GROUPS, DIM)).repeat_interleave(HEADS // GROUPS, dim=0).flatten(0, 1)
    twin.load_state_dict(state)
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH))
    shake(adapter)
    wide = fw.attach(twin, fw.PrefixTuning(length=LENGTH)).state_dict()
    for name, tensor in adapter.state_dict().items():
        assert tensor.shape == (GROUPS, LENGTH, DIM)
        wide[name].copy_(tensor.repeat_interleave(HEADS // GROUPS, dim=0))
    assert len(wide) == 2 * LAYERS
    exactly(twin(ids).logits, model(ids).logits)
