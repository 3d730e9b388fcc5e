"""The oracle itself: without a prefix it is the model."""

import pytest
import torch
from naive import exactly, random_ids


@torch.no_grad()
def test_the_decoder_is_the_model(model, decoder, ids):
    exactly(decoder(ids), model(ids).logits)


@torch.no_grad()
def test_with_left_padding(model, decoder, ids):
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    exactly(decoder(ids, positions, mask=mask)[mask.bool()], padded[mask.bool()])
    exactly(decoder(ids, positions, mask=mask)[1:, 3:], decoder(ids[1:, 3:]))


@torch.no_grad()
@pytest.mark.parametrize("split", [1, 5, 8])
def test_with_its_cache(decoder, split):
    ids, cache = random_ids(), []
    parts = [decoder(ids[:, :split], cache=cache)]
    for at in range(split, ids.shape[1]):
        parts.append(decoder(ids[:, at : at + 1], torch.tensor([at]), cache=cache))
    exactly(torch.cat(parts, dim=1), decoder(ids))
