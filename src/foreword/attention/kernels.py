"""PyTorch's fused attention over one segment of keys, with its log-sum-exp and its backward, behind one interface.

The kernels are private operators of ATen, so each is probed before its first use on a device, dtype and head width: it
must reproduce a small joint softmax, forward and backward. One that is absent, raises or differs is not called there,
and the reference path answers instead.

The backward of every flash kernel computes, from the output o and the log-sum-exp of its rows,

    p = exp(s − lse),   δ = Σ_d do·o,   ds = p (do Vᵀ − δ),   dq = ds K,   dK = dsᵀ q,   dV = pᵀ do.

Nothing in it says that o and lse belong to the same keys. Given those of a softmax over more keys than it sees, it
returns the exact gradients of its share of that softmax (the identity behind ring attention, Liu et al. 2023).
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch
from torch import Tensor

from .merge import causal_mask, merge

logger = logging.getLogger("foreword")
aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


class Kernel(Protocol):
    """One fused attention.

    Attributes:
        name: of the ATen operator.
        takes_mask: whether it takes an additive mask.
    """

    name: str
    takes_mask: bool

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """o (B, H, T, D) and lse (B, H, T).

        query (B, H, T, D); key, value (B, G, S, D); mask additive (B | 1, H | 1, T | 1, S) or None; causal: query t
        sees keys 0 … t.
        """
        ...

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        causal: bool,
        scaling: float,
    ) -> Gradients:
        """Gradients of query, key and value, for the o and lse of the whole softmax."""
        ...


class FlashCPU:
    """Flash attention of PyTorch on CPUs: any head width, grouped heads, any mask."""

    name = "_scaled_dot_product_flash_attention_for_cpu"
    takes_mask = True

    # Up to this many scores a head, the backward in half precision spends its time on the set-up of small matrix
    # products: with 9 heads of width 64, 4×128 tokens take 18 ms in bf16 and 6 ms in fp32 with the conversions, 4×512
    # tokens 63 and 64 (one core of a Xeon with AMX).
    small = 2**17

    # From so many keys on, query heads of one group that stand behind each other as rows of one product are faster in
    # half precision: with 9 heads in 3 groups, 512 queries and keys take 11 ms instead of 15 ms in bf16.
    long = 256

    @classmethod
    def is_slow_backward(cls, query: Tensor, key: Tensor) -> bool:
        """Whether PyTorch's backward is several times slower than the one below."""
        return query.device.type == "cpu" and query.dtype.itemsize == 2 and query.shape[2] * key.shape[2] <= cls.small

    def forward(self, query, key, value, mask, causal, scaling):
        long = query.dtype == torch.float32 and query.shape[2] == 1 and key.shape[2] > 64
        if long and query.shape[1] > key.shape[1] and (mask is None or mask.shape[1] == 1):
            return self._one_token(query, key, value, mask, scaling)
        # the same operator as aten's, bound to Python directly: 4 of the 13 µs that one token and 30 keys take
        return torch._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
        )

    def _one_token(self, query, key, value, mask, scaling):
        """The query heads of one group are rows of one matrix product. In bf16 the kernel is faster without."""
        batch, heads, _, dim = query.shape
        packed = query.reshape(batch, key.shape[1], -1, dim)  # (B, G, H/G, D)
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            packed, key, value, 0.0, False, attn_mask=mask, scale=scaling
        )
        return out.reshape(batch, heads, 1, dim), lse.reshape(batch, heads, 1)

    def backward(self, grad_out, query, key, value, out, lse, mask, causal, scaling):
        shape, dtype = query.shape, query.dtype
        if self.is_slow_backward(query, key):
            grad_out, query, key, value, out = (x.float() for x in (grad_out, query, key, value, out))
            mask = None if mask is None else mask.float()
        elif dtype.itemsize == 2 and mask is None and not causal and key.shape[2] >= self.long:
            packed = (len(query), key.shape[1], -1)  # (B, G, H/G · T)
            grad_out, query, out = (x.reshape(*packed, x.shape[-1]) for x in (grad_out, query, out))
            lse = lse.reshape(packed)
        grad_query, *gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scaling
        )
        return grad_query.to(dtype).reshape(shape), *(gradient.to(dtype) for gradient in gradients)


class FlashCUDA:
    """FlashAttention-2 as PyTorch ships it: fp16 and bf16, grouped heads, no mask but the causal one."""

    name = "_scaled_dot_product_flash_attention"
    takes_mask = False

    def forward(self, query, key, value, mask, causal, scaling):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scaling)
        return out, lse

    def backward(self, grad_out, query, key, value, out, lse, mask, causal, scaling):
        unused = query.new_zeros(2, dtype=torch.int64)  # the state of a dropout that isn't there
        return aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal,
            unused, unused, scale=scaling,
        )  # fmt: skip


class EfficientCUDA:
    """Memory-efficient attention of PyTorch: fp32 too, and any mask; as many key heads as query heads."""

    name = "_scaled_dot_product_efficient_attention"
    takes_mask = True

    def forward(self, query, key, value, mask, causal, scaling):
        repeats = query.shape[1] // key.shape[1]
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, repeat_heads(key, repeats), repeat_heads(value, repeats), self._aligned(mask, query, key), True, 0.0,
            causal, scale=scaling,
        )  # fmt: skip
        return out, lse[..., : query.shape[2]]

    def backward(self, grad_out, query, key, value, out, lse, mask, causal, scaling):
        repeats = query.shape[1] // key.shape[1]
        seed = query.new_zeros((), dtype=torch.int64)  # of a dropout that isn't there
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32))
        grad_query, grad_key, grad_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, query, repeat_heads(key, repeats), repeat_heads(value, repeats), self._aligned(mask, query, key),
            out, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scaling,
        )  # fmt: skip
        return grad_query, *(x.unflatten(1, (-1, repeats)).sum(2) for x in (grad_key, grad_value))

    def _aligned(self, mask, query, key):
        """The mask for every row and head, its rows 16 elements apart."""
        if mask is None:
            return None
        size = key.shape[2]
        padded = torch.nn.functional.pad(mask, (0, -size % 16))[..., :size]
        return padded.expand(query.shape[0], query.shape[1], query.shape[2], size)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean (True is visible) or additive mask as an additive one without −inf: no row has lse = −inf."""
    if mask is None:
        return None
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=dtype, device=mask.device).where(mask, lowest)
    return mask.to(dtype).clamp(min=lowest)


KERNELS: dict[str, tuple[Kernel, ...]] = {"cpu": (FlashCPU(),), "cuda": (FlashCUDA(), EfficientCUDA())}


def repeat_heads(tensor: Tensor, repeats: int) -> Tensor:
    """(B, G, S, D) → (B, G·repeats, S, D), each head `repeats` times side by side."""
    if repeats == 1:
        return tensor
    return tensor[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)


@functools.cache
def kernel_for(device_type: str, dtype: torch.dtype, width: int, masked: bool) -> Kernel | None:
    """The fastest kernel that passes its probe on this kind of device, or None. Probed once a process.

    Not every kernel takes every width D of a head.
    """
    for kernel in KERNELS.get(device_type, ()):
        if kernel.takes_mask or not masked:
            reason = probe(kernel, torch.device(device_type), dtype, width, masked)
            if reason is None:
                return kernel
            logger.debug("%s is not used for %s of width %d on %s: %s", kernel.name, dtype, width, device_type, reason)
    return None


@torch.compiler.assume_constant_result
def is_fused(device_type: str, dtype: torch.dtype, width: int) -> bool:
    """Whether kernels serve heads of this dtype and width, with and without a mask."""
    return all(kernel_for(device_type, dtype, width, masked) is not None for masked in (False, True))


def probe(kernel: Kernel, device: torch.device, dtype: torch.dtype, width: int, masked: bool) -> str | None:
    """None where `kernel` reproduces a small joint softmax and its gradients; else what went wrong.

    Two rows of 5 tokens read 3 prefix keys and themselves, with 4 query heads in 2 groups.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 5, width), *[(2, 2, 5, width)] * 2, *[(2, 2, 3, width)] * 2, (2, 4, 5, width)]
    *inputs, grad_out = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool, device=device)
    mask[0, :, :, :2] = mask[1, :, 1] = False  # left padding, and a query that sees no token
    if not masked:
        mask = causal_mask(5, 5, device)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    try:
        actual = _joint(kernel, inputs, grad_out, additive(mask, dtype) if masked else None)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as failure:
        return str(failure).strip().splitlines()[0]
    expected = _expected_joint(inputs, grad_out, mask)
    error = max(
        ((a - e).abs().max() / e.abs().max()).item() for a, e in zip(actual, expected, strict=True)
    )  # as a share of the largest entry
    return None if error <= tolerance else f"it is off by {error:.1e} of the largest entry"


@torch.no_grad()
def _joint(kernel: Kernel, inputs: list[Tensor], grad_out: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Output and gradients of the joint softmax by `kernel`; without a mask the tokens are causal."""
    query, key, value, prefix_key, prefix_value = inputs
    scaling = query.shape[-1] ** -0.5
    causal, free = mask is None, None if mask is None else torch.zeros_like(mask[..., :3])
    out, lse = merge(
        *kernel.forward(query, key, value, mask, causal, scaling),
        *kernel.forward(query, prefix_key, prefix_value, free, False, scaling),
    )
    of_tokens = kernel.backward(grad_out, query, key, value, out, lse, mask, causal, scaling)
    of_prefix = kernel.backward(grad_out, query, prefix_key, prefix_value, out, lse, free, False, scaling)
    return [out, of_tokens[0] + of_prefix[0], *of_tokens[1:], *of_prefix[1:]]


def _expected_joint(inputs: list[Tensor], grad_out: Tensor, mask: Tensor) -> list[Tensor]:
    """The same by one softmax over [prefix; tokens] in float64. Autograd may be off where a probe runs."""
    query, key, value, prefix_key, prefix_value = (x.double() for x in inputs)
    scaling = query.shape[-1] ** -0.5
    keys, values = (repeat_heads(torch.cat(pair, 2), 2) for pair in ((prefix_key, key), (prefix_value, value)))
    scores = query @ keys.transpose(-1, -2) * scaling
    scores[..., 3:].masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1)
    out, grad_out = weights @ values, grad_out.double()
    grad_scores = weights * (grad_out @ values.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True)) * scaling
    grad_keys, grad_values = (
        x.unflatten(1, (2, 2)).sum(2)
        for x in (grad_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad_out)
    )
    grads = (grad_keys[:, :, 3:], grad_values[:, :, 3:], grad_keys[:, :, :3], grad_values[:, :, :3])
    return [out, grad_scores @ keys, *grads]
