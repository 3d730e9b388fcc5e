"""Where the text stands relative to a prefix: I6, I8, I24."""

import naive
import pytest
import torch
from naive import DIM, LAYERS, differs, exactly, key_values, random_ids, rotate
from transformers.models.llama import modeling_llama

import foreword as fw
from conformance import shake

LENGTH, TEXT, PADS = 5, 9, 3
METHODS = {
    "prefix-tuning": fw.PrefixTuning(length=LENGTH),
    "deep-prompt": fw.DeepPrompt(length=LENGTH),
    "prompt-tuning": fw.PromptTuning(length=LENGTH),
    "zero-init": fw.ZeroInit(length=LENGTH, layers=3, opening=0.5),
    "random-init": fw.RandomInit(length=LENGTH, layers=3),
}


@torch.no_grad()
def test_i6_a_shift_of_the_text_is_a_rotation_of_the_keys(model, decoder, ids):
    """Text at t + s with keys P = text at t with keys R_{−s} P; without a prefix the shift is invisible."""
    by = 7
    positions = torch.arange(TEXT)[None] + by
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH))
    shake(adapter)
    shifted = model(ids, position_ids=positions).logits
    pairs = key_values(adapter)
    turned = [(rotate(key, torch.full((LENGTH,), -by)), value) for key, value in pairs]
    exactly(shifted, decoder(ids, key_values=turned))
    exactly(shifted, decoder(ids, positions[0], key_values=pairs))
    differs(shifted, model(ids).logits)
    for layer, (key, _) in enumerate(turned):
        adapter.state_dict()[f"0.self.{layer}.source.key"].copy_(key)
    exactly(model(ids).logits, shifted)

    fw.set_active(model, None)
    exactly(model(ids, position_ids=positions).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_i8_left_padded_rows_are_the_rows_alone(model, ids, method):
    """Positions count from the first real token, with positions from the caller or without."""
    adapter = fw.attach(model, METHODS[method])
    shake(adapter)
    mask = torch.ones(2, TEXT, dtype=torch.long)
    mask[1, :PADS] = 0
    batch = model(ids, attention_mask=mask).logits
    exactly(batch[0], model(ids[:1]).logits[0])
    exactly(batch[1, PADS:], model(ids[1:, PADS:]).logits[0])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    exactly(model(ids, attention_mask=mask, position_ids=positions).logits, batch)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_i8_positions_that_count_the_pads_are_wrong(model, ids, method):
    """The negative control: the prefix sees absolute positions, which the base model can't tell apart."""
    shake(fw.attach(model, METHODS[method]))
    mask = torch.ones(2, TEXT, dtype=torch.long)
    mask[:, :PADS] = 0
    columns = torch.arange(TEXT)[None]
    counted = model(ids, attention_mask=mask, position_ids=columns).logits[:, PADS:]
    differs(counted, model(ids[:, PADS:]).logits)
    fw.set_active(model, None)
    exactly(model(ids, attention_mask=mask, position_ids=columns).logits[:, PADS:], model(ids[:, PADS:]).logits)


@torch.no_grad()
def test_i8_against_the_naive_decoder(model, decoder, ids):
    adapter = fw.attach(model, fw.PrefixTuning(length=LENGTH))
    shake(adapter)
    mask = torch.ones(2, TEXT, dtype=torch.long)
    mask[1, :PADS] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = decoder(ids, positions, mask=mask, key_values=key_values(adapter))
    exactly(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])


INTERLEAVED = torch.arange(DIM).view(2, -1).T.flatten()  # 0, D/2, 1, D/2 + 1, …: the half-split pairs side by side


def interleaved_rotation(query, key, cos, sin, unsqueeze_dim=1):
    """The rotation of Meta's checkpoints: channels 2i and 2i + 1 are one complex number."""

    def turn(x):
        angles = torch.complex(cos, sin)[..., : DIM // 2].unsqueeze(unsqueeze_dim)
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * angles).flatten(-2)

    return turn(query), turn(key)


@torch.no_grad()
@pytest.mark.parametrize("method", ["prefix-tuning", "deep-prompt"])
def test_i24_the_layout_of_rotated_channels_is_the_models_own(model, monkeypatch, method):
    """A twin with interleaved rotations takes the same prefix, its key channels permuted, and the same rows."""
    ids = random_ids()
    adapter = fw.attach(model, METHODS[method])
    shake(adapter)
    expected = model(ids).logits
    state = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    fw.detach(model, "default")

    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.copy_(projection.weight.unflatten(0, (-1, DIM))[:, INTERLEAVED].flatten(0, 1))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved_rotation)
    twin = fw.attach(model, METHODS[method])
    for name, tensor in twin.state_dict().items():
        tensor.copy_(state[name][..., INTERLEAVED] if name.endswith("key") else state[name])
    exactly(model(ids).logits, expected)
    if method == "prefix-tuning":
        for layer in range(LAYERS):
            twin.state_dict()[f"0.self.{layer}.source.key"].copy_(state[f"0.self.{layer}.source.key"])
        differs(model(ids).logits, expected)


def test_i24_on_vectors():
    x = torch.randn(3, TEXT, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = naive.Rotary()(x, torch.arange(TEXT)[None])
    turned, _ = interleaved_rotation(x[None, ..., INTERLEAVED], x[None, ..., INTERLEAVED], cos, sin)
    exactly(turned[0], rotate(x, torch.arange(TEXT))[..., INTERLEAVED])
