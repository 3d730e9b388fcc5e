"""One form of mask for what each attention implementation is given."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from foreword.attention.masks import token_mask


def module(implementation: str = "sdpa", is_causal: bool = True) -> nn.Module:
    made = nn.Module()
    made.config = SimpleNamespace(_attn_implementation=implementation)
    made.is_causal = is_causal
    return made


def call(length: int, size: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 4, length, 8), torch.zeros(rows, 2, size, 8)


@pytest.mark.parametrize(
    ("length", "is_causal", "argument", "expected"),
    [(5, True, None, True), (1, True, None, False), (5, False, None, False), (5, True, False, False)],
)
def test_no_mask(length: int, is_causal: bool, argument: bool | None, expected: bool) -> None:
    """The call's own `is_causal` goes before the module's; one query is the last one."""
    kwargs = {"is_causal": argument}
    assert token_mask(module(is_causal=is_causal), *call(length, 5), None, kwargs) == (None, expected)


def test_a_mask_is_cut_to_the_keys() -> None:
    mask = torch.rand(2, 1, 3, 9) > 0.5
    cut, causal = token_mask(module(), *call(3, 7), mask, {})
    assert torch.equal(cut, mask[..., :7])
    assert not causal


def test_block_mask_of_flex_attention() -> None:
    def window(row, head, query, key):
        return (key <= query) & (query - key < 3 + row)

    block = create_block_mask(window, 2, None, 9, 9, device="cpu")
    mask, causal = token_mask(module("flex_attention"), *call(9, 9), block, {})
    expected = [[[window(b, 0, q, k) for k in range(9)] for q in range(9)] for b in range(2)]
    assert torch.equal(mask.expand(2, 4, 9, 9)[:, 0], torch.tensor(expected))
    assert not causal


@pytest.mark.parametrize(
    "told",
    [
        {"cu_seq_lens_q": torch.tensor([0, 3, 4, 7])},
        {"position_ids": torch.tensor([[2, 3, 4, 0, 0, 1, 2]])},
    ],
)
def test_texts_packed_in_one_row_of_flash_attention(told: dict) -> None:
    """No token sees another text."""
    mask, causal = token_mask(module("flash_attention_2"), *call(7, 7, rows=1), None, told)
    texts = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    assert not causal
    assert torch.equal(mask[0, 0], (texts[:, None] == texts) & torch.ones(7, 7, dtype=torch.bool).tril())


def test_one_text_in_one_row_of_flash_attention() -> None:
    told = {"position_ids": torch.arange(3, 10)[None]}  # behind a prefix that takes positions
    assert token_mask(module("flash_attention_2"), *call(7, 7, rows=1), None, told) == (None, True)


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_and_window_of_flash_attention(length: int, window: int | None, padded: bool, is_causal: bool) -> None:
    """The last query stands at the last key, as flash attention aligns them."""
    size = 7
    padding = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]]) if padded else None
    arguments = (module("flash_attention_2", is_causal), *call(length, size), padding, {"sliding_window": window})
    mask, causal = token_mask(*arguments)
    if mask is None:
        mask = torch.ones(length, size, dtype=torch.bool).tril(0 if causal else size)
    for row in range(2):
        for query in range(length):
            for key in range(size):
                at = size - length + query
                seen = (key <= at or not is_causal) and (window is None or at - key < window)
                seen = seen and (padding is None or bool(padding[row, key]))
                assert bool(mask.expand(2, 1, length, size)[row, 0, query, key]) == seen
