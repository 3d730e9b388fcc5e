"""Where a prefix is placed: kinds of attention and layers."""

import pytest
import torch

import foreword as fw
import zoo
from conformance import close, shake, text


@pytest.mark.parametrize(
    ("attention", "kinds"),
    [
        ("all", {"self", "cross", "encoder"}),
        ("self", {"self"}),
        ("cross", {"cross"}),
        ("encoder", {"encoder"}),
        ("self+encoder", {"self", "encoder"}),
    ],
)
@pytest.mark.parametrize("architecture", ["bart", "t5", "whisper"])
def test_kinds_of_attention(architecture, attention, kinds):
    model = zoo.make(architecture)
    adapter = fw.attach(model, fw.PrefixTuning(length=4, attention=attention))
    assert {name.split(".")[1] for name in adapter.state_dict()} == kinds
    assert len(adapter.state_dict()) == 2 * 2 * len(kinds)  # keys and values of two layers


@torch.no_grad()
def test_where_a_kind_acts():
    """A cross-attention prefix leaves the encoder as it is; an encoder prefix changes its states."""
    model = zoo.make("bart")
    ids = text()
    states = model.model.encoder(ids).last_hidden_state
    logits = model(input_ids=ids, decoder_input_ids=text(seed=3)).logits
    for attention in ("self", "cross", "encoder"):
        shake(fw.attach(model, fw.PrefixTuning(length=4, attention=attention)))
        assert not torch.equal(model(input_ids=ids, decoder_input_ids=text(seed=3)).logits, logits)
        assert torch.equal(model.model.encoder(ids).last_hidden_state, states) == (attention != "encoder")
        fw.detach(model, "default")


@torch.no_grad()
def test_a_cross_attention_prefix_is_more_encoder_states():
    """Made of the keys and values of two encoder states, it is those states beside the others."""
    model = zoo.make("bart")
    states = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0))
    decoder_ids = text(seed=3)
    extra = states[:1, :2]
    whole = torch.cat([extra.expand(3, -1, -1), states], dim=1)
    expected = model(decoder_input_ids=decoder_ids, encoder_outputs=(whole,)).logits
    adapter = fw.attach(model, fw.PrefixTuning(length=2, attention="cross"))
    for layer, module in enumerate(model.model.decoder.layers):
        for part, projection in [("key", module.encoder_attn.k_proj), ("value", module.encoder_attn.v_proj)]:
            heads = projection(extra[0]).view(2, 4, 8).transpose(0, 1)
            adapter.state_dict()[f"0.cross.{layer}.source.{part}"].copy_(heads)
    close(model(decoder_input_ids=decoder_ids, encoder_outputs=(states,)).logits, expected)


def test_layers():
    model = zoo.make("llama")

    def layers(choice):
        adapter = fw.attach(model, fw.PrefixTuning(length=2, layers=choice))
        found = sorted({int(name.split(".")[2]) for name in adapter.state_dict()})
        fw.detach(model, "default")
        return found

    assert layers(None) == [0, 1, 2]
    assert layers(2) == [1, 2]
    assert layers([2, 0, 2]) == [0, 2]
    assert layers((-1,)) == [2]
    assert layers("upper") == [2]
