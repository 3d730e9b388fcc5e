"""Hidden-state prefixes put in again at every layer: I9, I21."""

import pytest
import torch
from naive import LAYERS, WIDTH, differs, exactly, rms, rotate

import foreword as fw
from conformance import shake

LENGTH, TEXT = 5, 9


@pytest.fixture
def adapter(model):
    adapter = fw.attach(model, fw.DeepPrompt(length=LENGTH))
    shake(adapter)
    return adapter


def rows(adapter):
    return [adapter.state_dict()[f"0.self.{layer}.source.rows"].clone() for layer in range(LAYERS)]


@torch.no_grad()
def test_i9_the_concatenation_at_every_layer(model, decoder, ids, adapter):
    """H^{i+1} = [p^{i+1}; H̄^{i+1}] with all l + n rows through every layer, prefix rows at positions 0 … l−1."""
    assert adapter.num_trainable == adapter.num_stored == LAYERS * LENGTH * WIDTH
    exactly(model(ids).logits, decoder(ids, rows=rows(adapter)))


def reduced(decoder, adapter, norm=True, rotation=True):
    """The same prefix as keys and values, in front of a text that starts at 0."""
    pairs = []
    for layer, p in enumerate(rows(adapter)):
        normed = rms(p, decoder.layer_weights(layer)["input_layernorm"]) if norm else p
        positions = torch.arange(-LENGTH, 0) if rotation else torch.zeros(LENGTH)
        _, key, value = decoder.project(layer, normed[None], positions)
        pairs.append((key[0], value[0]))
    return pairs


@torch.no_grad()
def test_i9_reduces_to_a_kv_prefix(model, decoder, ids, adapter):
    logits = model(ids).logits
    exactly(logits, decoder(ids, key_values=reduced(decoder, adapter)))
    differs(logits, decoder(ids, key_values=reduced(decoder, adapter, norm=False)))
    differs(logits, decoder(ids, key_values=reduced(decoder, adapter, rotation=False)))


@torch.no_grad()
def test_i9_as_prefix_tuning(model, ids, adapter):
    """`prefix-tuning` whose parameters are the projected rows is the same adapter."""
    logits = model(ids).logits
    pairs = adapter.parts[0].modules
    twin = fw.attach(model, fw.PrefixTuning(length=LENGTH), name="twin").state_dict()
    for site, prefix in pairs.items():
        key, value = prefix.key_value(site, None)
        twin[f"0.{site.label}.source.key"].copy_(key)
        twin[f"0.{site.label}.source.value"].copy_(value)
    exactly(model(ids).logits, logits)


@torch.no_grad()
def test_i9_scale_hardly_matters(model, ids, adapter):
    """RMSNorm forgets the length of a row, up to its ε."""
    for tensor in adapter.state_dict().values():
        tensor.mul_(10)  # long beside √ε
    logits = model(ids).logits
    for tensor in adapter.state_dict().values():
        tensor.mul_(3)
    exactly(model(ids).logits, logits, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("placeholder", [3, 17])
def test_i21_placeholders_under_the_prefix_are_irrelevant(model, ids, adapter, placeholder):
    """The base model on [placeholders; text] whose first l rows are overwritten at the input of every layer."""
    expected, prefix = model(ids).logits, rows(adapter)
    fw.detach(model, "default")
    seen = []

    def overwrite(layer):
        def hook(module, args):
            states = torch.cat([prefix[layer].expand(len(ids), -1, -1), args[0][:, LENGTH:]], dim=1)
            seen.append(states.shape[1])
            return states, *args[1:]

        return hook

    for layer, module in enumerate(model.model.layers):
        module.register_forward_pre_hook(overwrite(layer))
    filled = torch.cat([torch.full((len(ids), LENGTH), placeholder), ids], dim=1)
    exactly(model(filled).logits[:, LENGTH:], expected)
    assert seen == [LENGTH + TEXT] * LAYERS


@torch.no_grad()
def test_the_text_rows_alone_go_through_the_layers(model, ids, adapter):
    lengths = []
    for module in model.model.layers:
        module.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    model(ids)
    assert lengths == [TEXT] * LAYERS


def test_rotation_control():
    """The control of I9 bites: keys at −l … −1 are not the unrotated keys."""
    key = torch.ones(1, LENGTH, 8, dtype=torch.float64)
    differs(rotate(key, torch.arange(-LENGTH, 0)), key)
