"""On every architecture a prefix gives what the model's own eager attention gives with it in front of the keys."""

import sys

import pytest
import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import foreword as fw
import zoo
from conformance import LENGTH, TEXT, close, left_padded, make_case, text

PADS = [0, 2, 3]


@pytest.fixture
def in_front():
    """Attention module → keys and values (G, l, D) that the attention named "concatenation" puts in front."""
    prefixes = {}

    def attention(module, query, key, value, attention_mask=None, *, foreword=None, **kwargs):
        if module in prefixes:
            key, value = (
                torch.cat([state.expand(len(own), -1, -1, -1), own], dim=2)
                for state, own in zip(prefixes[module], (key, value), strict=True)
            )
            attention_mask = None if attention_mask is None else pad(attention_mask, (LENGTH, 0))
            if kwargs.get("position_bias") is not None:  # T5: the prefix has none
                kwargs["position_bias"] = pad(kwargs["position_bias"], (LENGTH, 0))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("concatenation", attention)
    AttentionMaskInterface.register("concatenation", eager_mask)
    return prefixes


@torch.no_grad()
@pytest.mark.parametrize("architecture", zoo.ZOO)
def test_a_prefix_stands_in_front_of_the_keys(architecture, in_front):
    case = make_case(architecture, fw.PrefixTuning(length=LENGTH))
    ids = text()
    padded, mask = left_padded(ids, PADS)
    logits = case.logits(ids)
    padded_logits = case.logits(padded, mask) if case.is_decoder else None

    layout, state = case.adapter.host.layout, case.adapter.state_dict()
    for site in layout.sites:
        in_front[site.module] = [state[f"0.{site.label}.source.{name}"].clone() for name in ("key", "value")]
    fw.set_active(case.model, None)
    assert (case.logits(ids) - logits).abs().max() > 1e-2
    case.model.set_attn_implementation("concatenation")
    first = LENGTH if layout.absolute_positions else 0  # position of the text
    positions = torch.arange(first, first + TEXT).expand(len(ids), -1)
    close(case.logits(ids, **({"position_ids": positions} if case.is_decoder else {})), logits)
    if padded_logits is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0) + first
        expected = case.logits(padded, mask, position_ids=positions)
        close(padded_logits[mask.bool()], expected[mask.bool()])
