"""The two ways to read a prefix, by fused kernels: in the tokens' softmax, and in a softmax of its own.

    joint_attention    o = softmax(q [P_k; K]ᵀ/√D) [P_v; V] = (1 − λ) o_x + λ o_p,  λ = σ(lse_p − lse_x)
    prefix_attention   o = softmax(q P_kᵀ/√D) P_v

Both are operators of PyTorch's library (`torch.ops.foreword`) with shapes for tracing and a backward of their own, so a
compiled model has no break at them. Beyond inputs and output they keep nothing for the backward but the lse (B, H, T).

A prefix that all rows share is read as one: the queries of the batch are folded into one long row, (B, H, T, D) →
(1, H, B·T, D), which in the layout of a transformers model is a view. Its gradients come out summed over the batch, and
no key is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Kernel, additive, kernel_for

__all__ = ["joint_attention", "prefix_attention"]


def joint_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    scaling: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention over [prefix; tokens] in one softmax.

    Args:
        query: (B, H, T, D).
        key, value: of the tokens, (B, G, S, D); H is a multiple of G.
        prefix_key, prefix_value: (1, G, l, D) for all rows, or (B, G, l, D).
        scaling: factor on q·k.
        mask: of the tokens, boolean (True is visible) or additive, (B | 1, H | 1, T | 1, S). A row may see no token.
        causal: query t sees keys 0 … t; with `mask` None.
        visible: (B, 1, 1, l) boolean, False where a row's prefix is padded; None where it is not.

    Returns:
        (B, T, H, D), contiguous. No gradient flows to the masks.
    """
    query, key, value, prefix_key, prefix_value = _autocast(query, key, value, prefix_key, prefix_value)
    arguments = (query, key, value, prefix_key, prefix_value, mask, visible, causal, scaling)
    return (_joint if _runs_bare() else _joint_operator)(*arguments)[0]


def prefix_attention(
    query: Tensor, prefix_key: Tensor, prefix_value: Tensor, scaling: float, *, visible: Tensor | None = None
) -> Tensor:
    """Attention over a prefix alone. Arguments and result as for `joint_attention`.

    The backward computes the output again rather than keep a (B, T, H, D) tensor that nothing else needs.
    """
    query, prefix_key, prefix_value = _autocast(query, prefix_key, prefix_value)
    arguments = (query, prefix_key, prefix_value, visible, scaling)
    return (_prefix if _runs_bare() else _prefix_operator)(*arguments)


def _runs_bare() -> bool:
    """Whether the operator's wrapping has no use: a decoding step is too short to pay for it."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of an enclosing autocast, as PyTorch's own attention casts them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _kernel(query: Tensor, mask: Tensor | None) -> Kernel:
    kernel = kernel_for(query.device.type, query.dtype, mask is not None)
    assert kernel is not None, f"no kernel for {query.dtype} on {query.device}"  # `is_fused` comes first
    return kernel


# ---------------------------------------------------------------------------------------------------------------------
# One prefix for all rows, or one for each


def _folds(query: Tensor, prefix: Tensor) -> bool:
    """A GPU's backward runs in parallel over rows, so there the rows stay apart and share the keys by stride."""
    return prefix.shape[0] == 1 and query.device.type == "cpu"


def _fold(tensor: Tensor) -> Tensor:
    """(B, H, T, …) → (1, H, B·T, …)."""
    if tensor.shape[0] == 1:
        return tensor
    if tensor.shape[2] == 1:
        return tensor.transpose(0, 2)
    return tensor.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


def _unfold(tensor: Tensor, batch: int) -> Tensor:
    """(1, H, B·T, …) → (B, H, T, …)."""
    if batch == 1:
        return tensor
    if batch == tensor.shape[2]:
        return tensor.transpose(0, 2)
    return tensor[0].transpose(0, 1).unflatten(0, (batch, -1)).transpose(1, 2)


def _read(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention over the prefix: o (B, H, T, D), lse (B, H, T)."""
    kernel, batch = _kernel(query, visible), query.shape[0]
    if _folds(query, key):
        out, lse = kernel.forward(_fold(query), key, value, None, False, scaling)
        return _unfold(out, batch), _unfold(lse, batch)
    key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    return kernel.forward(query, key, value, additive(visible, query.dtype), False, scaling)


def _read_backward(grad_out, query, key, value, out, lse, visible, scaling) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for the o and lse of the whole softmax."""
    kernel, batch = _kernel(query, visible), query.shape[0]
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


# ---------------------------------------------------------------------------------------------------------------------
# In the tokens' softmax


def _concatenates(query: Tensor, key: Tensor, prefix: Tensor) -> bool:
    """Whether one pass over copied keys [prefix; tokens] is faster than two passes and their merge.

    On a CPU in fp32 or better it is where a short prefix meets a whole text: at 4×128 tokens it adds 1.5 and 3.3 ms at
    l = 10 and 30, the merge 5.0 and 4.6; at l = 512 21 and 20 (benchmarks/attention.py). In half precision the merge's
    causal pass is faster. A few tokens that continue a long text would copy their cache.
    """
    exact = query.dtype.itemsize >= 4 and query.device.type == "cpu"
    return exact and prefix.shape[2] <= 256 and 1 < key.shape[2] <= 2 * query.shape[2]


def _behind(prefix: Tensor, tokens: Tensor) -> Tensor:
    """(1 | B, G, l, D), (B, G, S, D) → (B, G, l + S, D)."""
    return torch.cat([prefix.expand(len(tokens), -1, -1, -1), tokens], 2)


def _seen(
    query: Tensor, key: Tensor, prefix: Tensor, mask: Tensor | None, visible: Tensor | None, causal: bool
) -> Tensor | None:
    """The additive mask (B | 1, H | 1, T, l + S) over [prefix; tokens]."""
    if visible is None and mask is None and not causal:
        return None
    length, lowest = query.shape[2], torch.finfo(query.dtype).min
    before = additive(visible, query.dtype)
    if before is None:
        before = query.new_zeros(1, 1, 1, prefix.shape[2])
    behind = additive(mask, query.dtype)
    if behind is None:
        behind = query.new_zeros(1, 1, length, key.shape[2])
        if causal:
            behind = behind.fill_(lowest).triu_(1)
    rows, heads = max(len(before), len(behind)), behind.shape[1]
    return torch.cat([x.expand(rows, heads, length, -1) for x in (before, behind)], -1)


def _joint(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    mask: Tensor | None,
    visible: Tensor | None,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The joint o (B, T, H, D) and lse (B, T, H)."""
    kernel = _kernel(query, mask)
    if _concatenates(query, key, prefix_key):
        seen = _seen(query, key, prefix_key, mask, visible, causal)
        out, lse = kernel.forward(query, _behind(prefix_key, key), _behind(prefix_value, value), seen, False, scaling)
    else:
        out, lse = kernel.forward(query, key, value, additive(mask, query.dtype), causal, scaling)
        prefix_out, prefix_lse = _read(query, prefix_key, prefix_value, visible, scaling)
        share = torch.sigmoid(prefix_lse - lse)[..., None].to(out.dtype)  # λ, (B, H, T, 1)
        out.lerp_(prefix_out, share)
        lse = torch.logaddexp(lse, prefix_lse)
    return out.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def _joint_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    visible: Tensor | None,
    causal: bool,
    scaling: float,
    tokens_need: bool,
) -> list[Tensor]:
    """Gradients of query (B, T, H, D), key and value (B, S, G, D), prefix key and value.

    Of the last two alone where nothing below this layer learns: the tokens' backward is left out.
    """
    grad_out, out, lse = grad_out.transpose(1, 2), out.transpose(1, 2), lse.transpose(1, 2)
    kernel = _kernel(query, mask)
    if tokens_need and _concatenates(query, key, prefix_key):
        seen, length = _seen(query, key, prefix_key, mask, visible, causal), prefix_key.shape[2]
        keys, values = _behind(prefix_key, key), _behind(prefix_value, value)
        grad_query, *grads = kernel.backward(grad_out, query, keys, values, out, lse, seen, False, scaling)
        tokens = [grad_query, *(x[:, :, length:] for x in grads)]
        prefix = [x[:, :, :length].sum_to_size(prefix_key.shape) for x in grads]
    else:
        grad_query, *prefix = _read_backward(grad_out, query, prefix_key, prefix_value, out, lse, visible, scaling)
        tokens = []
        if tokens_need:
            hidden = additive(mask, query.dtype)
            more, *grads = kernel.backward(grad_out, query, key, value, out, lse, hidden, causal, scaling)
            tokens = [more.add_(grad_query), *grads]
    return [*(x.transpose(1, 2).contiguous() for x in tokens), *(x.contiguous() for x in prefix)]


_joint_operator = torch.library.custom_op("foreword::joint_attention", _joint, mutates_args=())
_joint_backward_operator = torch.library.custom_op(
    "foreword::joint_attention_backward", _joint_backward, mutates_args=()
)


@_joint_operator.register_fake
def _(query, key, value, prefix_key, prefix_value, mask, visible, causal, scaling):
    batch, heads, length, dim = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(batch, length, heads, dim), query.new_empty(batch, length, heads, dtype=exact)


@_joint_backward_operator.register_fake
def _(grad_out, query, key, value, prefix_key, prefix_value, out, lse, mask, visible, causal, scaling, tokens_need):
    tokens = [x.new_empty(x.transpose(1, 2).shape) for x in (query, key, value)] if tokens_need else []
    return [*tokens, *(x.new_empty(x.shape) for x in (prefix_key, prefix_value))]


def _joint_setup(ctx, inputs, output):
    *tensors, ctx.causal, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)


def _joint_gradients(ctx, grad_out, _):
    query, key, value, prefix_key, prefix_value, mask, visible, out, lse = ctx.saved_tensors
    tokens_need = any(ctx.needs_input_grad[:3])
    grads = _joint_backward_operator(
        grad_out,
        query,
        key,
        value,
        prefix_key,
        prefix_value,
        out,
        lse,
        mask,
        visible,
        ctx.causal,
        ctx.scaling,
        tokens_need,
    )
    tokens = [x.transpose(1, 2) for x in grads[:3]] if tokens_need else [None] * 3
    return *tokens, *grads[-2:], None, None, None, None


_joint_operator.register_autograd(_joint_gradients, setup_context=_joint_setup)

# ---------------------------------------------------------------------------------------------------------------------
# In a softmax of its own


def _prefix(query: Tensor, prefix_key: Tensor, prefix_value: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    """o (B, T, H, D)."""
    out, _ = _read(query, prefix_key, prefix_value, visible, scaling)
    return out.transpose(1, 2).contiguous()


def _prefix_backward(
    grad_out: Tensor, query: Tensor, prefix_key: Tensor, prefix_value: Tensor, visible: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query (B, T, H, D), prefix key and value."""
    out, lse = _read(query, prefix_key, prefix_value, visible, scaling)
    grad_query, grad_key, grad_value = _read_backward(
        grad_out.transpose(1, 2), query, prefix_key, prefix_value, out, lse, visible, scaling
    )
    return grad_query.transpose(1, 2).contiguous(), grad_key.contiguous(), grad_value.contiguous()


_prefix_operator = torch.library.custom_op("foreword::prefix_attention", _prefix, mutates_args=())
_prefix_backward_operator = torch.library.custom_op(
    "foreword::prefix_attention_backward", _prefix_backward, mutates_args=()
)


@_prefix_operator.register_fake
def _(query, prefix_key, prefix_value, visible, scaling):
    return query.new_empty(query.transpose(1, 2).shape)


@_prefix_backward_operator.register_fake
def _(grad_out, query, prefix_key, prefix_value, visible, scaling):
    return query.new_empty(query.transpose(1, 2).shape), *(x.new_empty(x.shape) for x in (prefix_key, prefix_value))


def _prefix_setup(ctx, inputs, output):
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors)


def _prefix_gradients(ctx, grad_out):
    grad_query, *grads = _prefix_backward_operator(grad_out, *ctx.saved_tensors, ctx.scaling)
    return grad_query.transpose(1, 2), *grads, None, None


_prefix_operator.register_autograd(_prefix_gradients, setup_context=_prefix_setup)
