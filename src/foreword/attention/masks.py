"""Which tokens a query sees, from what each attention implementation of transformers is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask


def token_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """The tokens' mask in one form for all implementations.

    Args:
        module: the attention module.
        query, key: (B, H, T, D), (B, G, S, D).
        mask: None; boolean or additive (B | 1, H | 1, T | 1, ≥ S); padding (B, ≥ S) as flash attention gets it; or a
            `BlockMask` of flex attention.
        kwargs: of the attention call.

    Returns:
        A mask (B | 1, H | 1, T | 1, S) or None, and whether, with None, query t sees keys 0 … t alone.
    """
    length, size = query.shape[2], key.shape[2]
    if mask is None and length == 1 and kwargs.get("sliding_window") is None:
        return None, False  # a step of decoding
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, query.shape[0], query.shape[1], length, size, device=query.device)
    elif implementation(module).startswith("flash"):
        texts = None if mask is not None else _packed_texts(query, key, kwargs)
        mask = _flash_mask(mask, texts, length, size, causal, kwargs.get("sliding_window"), query.device)
    if mask is not None:
        return mask[..., :size], False
    return None, causal and length > 1


def implementation(module: nn.Module) -> str:
    """The name under which transformers found the attention function of `module`."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) or ""


def _packed_texts(query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """(T,) the number of the text that each token belongs to, where one row holds several without a mask; else None.

    Flash attention knows them by where they begin (`cu_seq_lens_q`), or by positions that don't count on.
    """
    length = query.shape[2]
    if query.shape[0] != 1 or length == 1 or length != key.shape[2]:
        return None
    starts, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if starts is not None:
        return torch.bucketize(torch.arange(length, device=query.device), starts[1:], right=True)
    if positions is None or positions.shape[-1] != length:
        return None
    restarts = positions.flatten().diff() != 1
    return torch.nn.functional.pad(restarts.cumsum(0), (1, 0)) if restarts.any() else None


def _flash_mask(
    padding: Tensor | None,
    texts: Tensor | None,
    length: int,
    size: int,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> Tensor | None:
    """What flash attention makes of padding (B, S), of texts (S,) in one row, of a causal flag and a window.

    The last query sees the last key.
    """
    windowed = window is not None and size > window
    if padding is None and texts is None and not windowed and (length in (1, size) or not causal):
        return None
    query = torch.arange(size - length, size, device=device)[:, None]
    key = torch.arange(size, device=device)
    visible = torch.ones(length, size, dtype=torch.bool, device=device)
    if causal:
        visible &= key <= query
    if windowed:
        visible &= query - key < window
    if texts is not None:
        visible &= texts[:, None] == texts
    visible = visible[None, None]
    return visible if padding is None else visible & padding[:, None, None, -size:].bool()
