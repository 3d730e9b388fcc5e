"""The two ways to read a prefix, by fused kernels: in the tokens' softmax, and in a softmax of its own.

    joint_attention    o = softmax(q [P_k; K]ᵀ/√D) [P_v; V] = (1 − λ) o_x + λ o_p,  λ = σ(lse_p − lse_x)
    prefix_attention   o = softmax(q P_kᵀ/√D) P_v
    token_attention    o = softmax(q Kᵀ/√D) V, for training where PyTorch's own backward is slow

The first two are operators of PyTorch's library (`torch.ops.foreword`) with shapes for tracing and a backward of their
own, so a compiled model has no break at them; the third is not called there. Beyond inputs and output they keep nothing
for the backward but the lse (B, H, T).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .kernels import additive
from .segment import kernel_of, read, read_backward

__all__ = ["joint_attention", "prefix_attention", "token_attention"]


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
    length = query.shape[2]
    if causal and key.shape[2] > length:
        # empty places of a static cache: kernels for GPUs would align the last query with the last of them
        key, value = key[:, :, :length], value[:, :, :length]
    arguments = (query, key, value, prefix_key, prefix_value, mask, visible, causal, scaling)
    return _lightest(_joint, _Joint.apply, _joint_operator)(*arguments)[0]


def prefix_attention(
    query: Tensor, prefix_key: Tensor, prefix_value: Tensor, scaling: float, *, visible: Tensor | None = None
) -> Tensor:
    """Attention over a prefix alone. Arguments and result as for `joint_attention`.

    The backward computes the output again rather than keep a (B, T, H, D) tensor that nothing else needs.
    """
    query, prefix_key, prefix_value = _autocast(query, prefix_key, prefix_value)
    arguments = (query, prefix_key, prefix_value, visible, scaling)
    return _lightest(_prefix, _Prefix.apply, _prefix_operator)(*arguments)


def token_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention over the tokens alone, by the kernels' backward. Arguments and result as for `joint_attention`."""
    return _Tokens.apply(*_autocast(query, key, value), mask, causal, scaling)[0]


def _lightest(bare: Callable, differentiable: Callable, operator: Callable) -> Callable:
    """The least wrapping that serves: a decoding step or a layer of a small batch is too short to pay for more."""
    if torch.compiler.is_compiling():
        return operator
    return differentiable if torch.is_grad_enabled() else bare


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of an enclosing autocast, as PyTorch's own attention casts them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


# ---------------------------------------------------------------------------------------------------------------------
# In the tokens' softmax


def _concatenates(query: Tensor, key: Tensor, prefix: Tensor) -> bool:
    """Whether one pass over copied keys [prefix; tokens] is faster than two passes and their merge.

    On a CPU in fp32 or better it is where a short prefix meets a whole text: at 4×128 tokens it adds 1.5 and 3.3 ms at
    l = 10 and 30, the merge 5.0 and 4.6; at l = 512 21 and 20 (benchmarks/attention.py). In half precision the merge's
    causal pass is faster. A few tokens that continue a long text would copy their cache.
    """
    if not 1 < key.shape[2] <= 2 * query.shape[2]:
        return False
    return prefix.shape[2] <= 256 and query.dtype.itemsize >= 4 and query.device.type == "cpu"


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
    kernel = kernel_of(query, mask)
    if _concatenates(query, key, prefix_key):
        seen = _seen(query, key, prefix_key, mask, visible, causal)
        out, lse = kernel.forward(query, _behind(prefix_key, key), _behind(prefix_value, value), seen, False, scaling)
    else:
        out, lse = kernel.forward(query, key, value, additive(mask, query.dtype), causal, scaling)
        prefix_out, prefix_lse = read(query, prefix_key, prefix_value, visible, scaling)
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
    kernel = kernel_of(query, mask)
    if tokens_need and _concatenates(query, key, prefix_key):
        seen, length = _seen(query, key, prefix_key, mask, visible, causal), prefix_key.shape[2]
        keys, values = _behind(prefix_key, key), _behind(prefix_value, value)
        grad_query, *grads = kernel.backward(grad_out, query, keys, values, out, lse, seen, False, scaling)
        tokens = [grad_query, *(x[:, :, length:] for x in grads)]
        prefix = [x[:, :, :length].sum_to_size(prefix_key.shape) for x in grads]
    else:
        grad_query, *prefix = read_backward(grad_out, query, prefix_key, prefix_value, out, lse, visible, scaling)
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


def _joint_gradients(backward, ctx, grad_out):
    query, key, value, prefix_key, prefix_value, mask, visible, out, lse = ctx.saved_tensors
    tokens_need = any(ctx.needs_input_grad[:3])
    grads = backward(
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


_joint_operator.register_autograd(
    lambda ctx, grad_out, _: _joint_gradients(_joint_backward_operator, ctx, grad_out), setup_context=_joint_setup
)


class _Joint(torch.autograd.Function):
    generate_vmap_rule = True

    forward = staticmethod(_joint)
    setup_context = staticmethod(_joint_setup)

    @staticmethod
    def backward(ctx, grad_out, _):
        return _joint_gradients(_joint_backward, ctx, grad_out)


# ---------------------------------------------------------------------------------------------------------------------
# In a softmax of its own


def _prefix(query: Tensor, prefix_key: Tensor, prefix_value: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    """o (B, T, H, D)."""
    out, _ = read(query, prefix_key, prefix_value, visible, scaling)
    return out.transpose(1, 2).contiguous()


def _prefix_backward(
    grad_out: Tensor, query: Tensor, prefix_key: Tensor, prefix_value: Tensor, visible: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query (B, T, H, D), prefix key and value."""
    out, lse = read(query, prefix_key, prefix_value, visible, scaling)
    grad_query, grad_key, grad_value = read_backward(
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


def _prefix_gradients(backward, ctx, grad_out):
    grad_query, *grads = backward(grad_out, *ctx.saved_tensors, ctx.scaling)
    return grad_query.transpose(1, 2), *grads, None, None


_prefix_operator.register_autograd(
    lambda ctx, grad_out: _prefix_gradients(_prefix_backward_operator, ctx, grad_out), setup_context=_prefix_setup
)


class _Prefix(torch.autograd.Function):
    generate_vmap_rule = True

    forward = staticmethod(_prefix)
    setup_context = staticmethod(_prefix_setup)

    @staticmethod
    def backward(ctx, grad_out):
        return _prefix_gradients(_prefix_backward, ctx, grad_out)


# ---------------------------------------------------------------------------------------------------------------------
# The tokens alone


class _Tokens(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, mask, causal, scaling):
        """o (B, T, H, D) and lse (B, H, T). Queries that see no token read 0, as in PyTorch's own attention."""
        hidden = additive(mask, query.dtype)
        out, lse = kernel_of(query, mask).forward(query, key, value, hidden, causal, scaling)
        return _cleared(out, hidden).transpose(1, 2).contiguous(), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.causal, ctx.scaling = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, grad_out, _):
        query, key, value, mask, out, lse = ctx.saved_tensors
        hidden = additive(mask, query.dtype)
        grad_out, out = _cleared(grad_out.transpose(1, 2), hidden), out.transpose(1, 2)
        kernel = kernel_of(query, mask)
        grads = kernel.backward(grad_out, query, key, value, out, lse, hidden, ctx.causal, ctx.scaling)
        return *grads, None, None, None


def _cleared(tensor: Tensor, hidden: Tensor | None) -> Tensor:
    """(B, H, T, D) with zeros for the queries that an additive mask hides every token from."""
    if hidden is None:
        return tensor
    return tensor.masked_fill((hidden == torch.finfo(hidden.dtype).min).all(-1, keepdim=True), 0)
