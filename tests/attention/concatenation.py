"""Attention over [prefix; tokens] by one explicit softmax: the oracle, and in bf16 the rival."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Problem:
    """One attention call in float64, with a gradient of its output.

    Attributes:
        query, key, value: (B, H, T, D), (B, G, S, D) as views of (B, T, H, D), the layout of transformers.
        prefix_key, prefix_value: (1, G, l, D) or (B, G, l, D).
        mask: what the operator is given.
        causal: the operator's flag.
        seen: (B, H | 1, T, S) boolean, what that means.
        visible: (B, 1, 1, l) boolean, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    prefix_key: Tensor
    prefix_value: Tensor
    grad_out: Tensor
    mask: Tensor | None
    causal: bool
    seen: Tensor
    visible: Tensor | None
    scaling: float = 0.2

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """Leaves of that dtype: query, key, value, prefix key, prefix value."""
        tensors = (self.query, self.key, self.value, self.prefix_key, self.prefix_value)
        return [tensor.to(dtype).detach().requires_grad_() for tensor in tensors]


def problem(
    rows: int = 2, heads: int = 4, groups: int = 2, tokens: int = 17, keys: int | None = None, width: int = 16,
    prefix: int = 10, masking: str = "causal", per_row: bool = False, seed: int = 0,
) -> Problem:  # fmt: skip
    """masking: "causal", "all", "left", "right" or "cache" (keys behind the last query are empty slots)."""
    generator = torch.Generator().manual_seed(seed)
    keys = keys or tokens

    def draw(*shape: int) -> Tensor:
        # values that bf16 holds exactly, so that every dtype computes on the same numbers
        return torch.randn(shape, generator=generator).bfloat16().double()

    query, key, value = (draw(rows, n, h, width).transpose(1, 2) for n, h in ((tokens, heads), *[(keys, groups)] * 2))
    prefixes = [draw(rows if per_row else 1, groups, prefix, width) for _ in range(2)]
    query = (query * 3).bfloat16().double()  # sharp softmaxes
    seen = torch.ones(rows, 1, tokens, keys, dtype=torch.bool)
    if masking != "all":
        seen = seen.tril(0 if masking in ("causal", "left", "right") else (keys - tokens) // 2)
    for row in range(rows):
        pads = min(row * 3, tokens)
        if masking == "left":
            seen[row, ..., :pads] = False  # the pad queries see nothing
        elif masking == "right":
            seen[row, ..., tokens - pads :] = False
    mask = {"causal": None, "all": None, "right": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min)}
    visible = None
    if per_row:
        lengths = torch.arange(rows) * prefix // max(rows - 1, 1)  # the first row has no prefix at all
        visible = (torch.arange(prefix) < lengths[:, None])[:, None, None]
    grad_out = draw(rows, tokens, heads, width)
    return Problem(query, key, value, *prefixes, grad_out, mask.get(masking, seen), masking == "causal", seen, visible)


def concatenated(case: Problem, dtype: torch.dtype) -> list[Tensor]:
    """Output (B, T, H, D) and the gradients of the five inputs, by eager attention in `dtype`, its softmax in fp32."""
    inputs = query, key, value, prefix_key, prefix_value = case.inputs(dtype)
    rows, heads = query.shape[:2]
    repeats = heads // key.shape[1]
    keys, values = (
        torch.cat([p.expand(rows, -1, -1, -1), x], 2).repeat_interleave(repeats, 1)
        for p, x in ((prefix_key, key), (prefix_value, value))
    )
    visible = case.visible
    if visible is None:
        visible = torch.ones(rows, 1, 1, prefix_key.shape[2], dtype=torch.bool)
    seen = torch.cat([visible.expand(-1, -1, query.shape[2], -1), case.seen], -1)
    scores = (query @ keys.transpose(-1, -2) * case.scaling).to(torch.promote_types(dtype, torch.float32))
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).to(dtype)
    nothing = ~seen.any(-1, keepdim=True)  # neither a token nor a prefix: no one reads this row
    out = (weights @ values).masked_fill(nothing, 0).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, inputs, case.grad_out.to(dtype))]
