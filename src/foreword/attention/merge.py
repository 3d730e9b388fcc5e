"""Attention over one segment of keys with its log-sum-exp, and the exact join of two segments.

This is the reference path: plain matrix products, softmax in fp32, right for grouped-query heads, any mask, soft-capped
scores and attention sinks. Faster kernels answer the same two questions and are tested against it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


def full_precision(tensor: Tensor) -> Tensor:
    """`tensor` in fp32, or as it is where it has more."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True)
class Scoring:
    """How a model turns q·k into attention scores; the same for its tokens and for a prefix.

    Attributes:
        scaling: factor on q·k, usually 1/√D; 1.0 where the model scales its queries beforehand.
        softcap: scores become softcap·tanh(scores/softcap) (Gemma 2); None leaves them as they are.
        dropout: probability of dropping an attention weight, 0 outside of training.
    """

    scaling: float
    softcap: float | None = None
    dropout: float = 0.0

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """q·k for each query head, in fp32 or better. query (B, H, T, D), key (B | 1, G, S, D) → (B, H, T, S)."""
        batch, heads, length, dim = query.shape
        groups = key.shape[1]
        grouped = query.reshape(batch, groups, heads // groups * length, dim)  # head h reads group h // (H/G)
        scores = (grouped @ key.transpose(-1, -2)).view(batch, heads, length, key.shape[2])
        scores = full_precision(scores) * self.scaling
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


def weigh(weights: Tensor, value: Tensor) -> Tensor:
    """Σ_s weights_s value_s for each query head. weights (B, H, T, S), value (B | 1, G, S, D) → (B, H, T, D)."""
    batch, heads, length, size = weights.shape
    groups = value.shape[1]
    grouped = weights.to(value.dtype).reshape(batch, groups, heads // groups * length, size)
    return (grouped @ value).view(batch, heads, length, value.shape[-1])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o = softmax(s) V and lse = log Σ_j exp s_j over one segment of keys.

    Args:
        query: (B, H, T, D).
        key, value: (B | 1, G, S, D_k) and (B | 1, G, S, D_v); H is a multiple of G.
        scoring: how scores are made of q·k.
        mask: None, boolean (True is visible) or additive, broadcastable to (B, H, T, S).
        sinks: (H,) scores that take attention mass and give no value (gpt-oss); they count in the lse.

    Returns:
        o (B, H, T, D_v), lse (B, H, T) in fp32 or better, and the weights (B, H, T, S). A row whose keys are all masked
        has an lse near the lowest fp32 number and a finite o, so that `merge` gives it no weight and no gradient.
    """
    scores = scoring.scores(query, key)  # (B, H, T, S)
    lowest = torch.finfo(scores.dtype).min
    if mask is not None:
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
        scores = scores.clamp(min=lowest)  # two large negative numbers may have summed to −inf
    lse = scores.logsumexp(-1)  # (B, H, T)
    if sinks is not None:
        lse = torch.logaddexp(lse, full_precision(sinks)[:, None])
    weights = torch.exp(scores - lse[..., None])
    weights = nn.functional.dropout(weights, scoring.dropout, training=scoring.dropout > 0)
    return weigh(weights, value), lse, weights


def merge(out: Tensor, lse: Tensor, prefix_out: Tensor, prefix_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join two segments under one softmax: o = (1 − λ) o_x + λ o_p with λ = σ(lse_p − lse_x).

    Args:
        out, prefix_out: (B, H, T, D).
        lse, prefix_lse: (B, H, T), as `attend` gives them.

    Returns:
        The joint output in the dtype of `out`, and the joint lse = log(exp lse_x + exp lse_p).
    """
    share = torch.sigmoid(prefix_lse - lse)[..., None]  # λ, (B, H, T, 1)
    joined = full_precision(out) + share * (full_precision(prefix_out) - full_precision(out))
    return joined.to(out.dtype), torch.logaddexp(lse, prefix_lse)


def causal_mask(length: int, keys: int, device: torch.device) -> Tensor:
    """(T, S) boolean lower triangle, aligned at the top left as PyTorch's `is_causal` is."""
    return torch.ones(length, keys, dtype=torch.bool, device=device).tril()
