"""A prefix read by a fused kernel: one that all rows share, or one for each.

A prefix that all rows share is read as one: the queries of the batch are folded into one long row, (B, H, T, D) →
(1, H, B·T, D), which in the layout of a transformers model is a view. Its gradients come out summed over the batch, and
no key is copied.
"""

from __future__ import annotations

from torch import Tensor

from .kernels import Kernel, additive, kernel_for


def kernel_of(query: Tensor, mask: Tensor | None) -> Kernel:
    kernel = kernel_for(query.device.type, query.dtype, query.shape[-1], mask is not None)
    assert kernel is not None, f"no kernel for {query.dtype} on {query.device}"  # `is_fused` comes first
    return kernel


def _folds(query: Tensor, prefix: Tensor) -> bool:
    """A GPU's backward runs in parallel over rows, so there the rows stay apart and share the keys by stride."""
    return prefix.shape[0] < query.shape[0] and query.device.type == "cpu"


def _fold(tensor: Tensor) -> Tensor:
    """(B, H, T, …) → (1, H, B·T, …)."""
    if tensor.shape[2] == 1:
        return tensor.transpose(0, 2)
    return tensor.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


def _unfold(tensor: Tensor, batch: int) -> Tensor:
    """(1, H, B·T, …) → (B, H, T, …)."""
    if batch == tensor.shape[2]:
        return tensor.transpose(0, 2)
    return tensor[0].transpose(0, 1).unflatten(0, (batch, -1)).transpose(1, 2)


def read(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention over the prefix: o (B, H, T, D), lse (B, H, T)."""
    kernel, batch = kernel_of(query, visible), query.shape[0]
    if _folds(query, key):
        out, lse = kernel.forward(_fold(query), key, value, None, False, scaling)
        return _unfold(out, batch), _unfold(lse, batch)
    if key.shape[0] < batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    return kernel.forward(query, key, value, additive(visible, query.dtype), False, scaling)


def read_backward(grad_out, query, key, value, out, lse, visible, scaling) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for the o and lse of the whole softmax."""
    kernel, batch = kernel_of(query, visible), query.shape[0]
    if _folds(query, key):
        grad_query, grad_key, grad_value = kernel.backward(
            _fold(grad_out), _fold(query), key, value, _fold(out), _fold(lse), None, False, scaling
        )
        return _unfold(grad_query, batch), grad_key, grad_value
    wide_key, wide_value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    hidden = additive(visible, query.dtype)
    grad_query, *grads = kernel.backward(grad_out, query, wide_key, wide_value, out, lse, hidden, False, scaling)
    grad_key, grad_value = (x.sum_to_size(key.shape) for x in grads)
    return grad_query, grad_key, grad_value
