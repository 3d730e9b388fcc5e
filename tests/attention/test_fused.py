"""The fused paths against one explicit softmax over [prefix; tokens]: outputs and every gradient."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attention.concatenation import Problem, concatenated, problem
from foreword.attention import fused
from foreword.attention.fused import joint_attention, prefix_attention, token_attention
from foreword.attention.kernels import FlashCPU
from foreword.attention.merge import Scoring
from foreword.combines import Ungated, ZeroGate

CASES = {
    "one prefix token": dict(prefix=1),
    "two prefix tokens, one token": dict(prefix=2, tokens=1, keys=9, masking="all", rows=8),
    "heads alike": dict(groups=4),
    "one key head": dict(groups=1, heads=6),
    "three groups of three": dict(groups=3, heads=9, width=64, tokens=128, prefix=33),
    "two tokens": dict(tokens=2, prefix=64),
    "long prefix": dict(prefix=512, tokens=17),
    "long text": dict(tokens=512, prefix=10, rows=1),
    "long both": dict(tokens=128, prefix=512, width=64),
    "long both, more scores": dict(groups=3, heads=9, tokens=160, prefix=512),
    "decoding": dict(tokens=1, keys=128, prefix=33, masking="all", rows=3),
    "left padding": dict(masking="left", rows=3),
    "left padding, long": dict(masking="left", rows=3, tokens=128, prefix=64),
    "left padding, long both": dict(masking="left", tokens=512, prefix=512),
    "right padding, additive": dict(masking="right", rows=3),
    "bidirectional": dict(masking="all"),
    "static cache": dict(masking="cache", tokens=5, keys=40),
    "one row each": dict(per_row=True, rows=4, masking="all"),
    "one row each, causal": dict(per_row=True, rows=3, masking="causal", prefix=33),
    "one row each, left padding": dict(per_row=True, rows=4, masking="left", tokens=32),
    "one row each, decoding": dict(per_row=True, rows=32, tokens=1, keys=40, prefix=16, masking="all"),
}


@pytest.fixture(params=["as chosen", "merged", "operator"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to join two segments, which the shapes choose between; and the operator that is there for compilers."""
    if request.param == "merged":
        monkeypatch.setattr(fused, "_concatenates", lambda *tensors: False)
    elif request.param == "operator":
        monkeypatch.setattr(fused, "_lightest", lambda bare, differentiable, operator: operator)


def fused_joint(case: Problem, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = case.inputs(dtype)
    mask = case.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    out = joint_attention(*inputs, case.scaling, mask=mask, causal=case.causal, visible=case.visible)
    assert out.is_contiguous()
    return [out.detach(), *torch.autograd.grad(out, inputs, case.grad_out.to(dtype))]


def unread(case: Problem) -> torch.Tensor:
    """(B, T, 1, 1): queries that see neither a token nor a prefix."""
    seen = case.seen.any(-1)  # (B, 1, T)
    seen = seen | (torch.ones(1, 1, 1, dtype=torch.bool) if case.visible is None else case.visible.any(-1))
    return ~seen.expand(len(case.query), 1, case.query.shape[2]).transpose(1, 2)[..., None]


def errors(actual: list[torch.Tensor], expected: list[torch.Tensor], case: Problem) -> list[float]:
    """‖actual − expected‖ / ‖expected‖ of the output and each gradient, without the rows that no one reads."""
    actual[0] = actual[0].masked_fill(unread(case), 0)
    return [((a.double() - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True)]


def readable(case: Problem) -> Problem:
    case.grad_out = case.grad_out.masked_fill(unread(case), 0)
    return case


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", CASES)
def test_exact_in_float64(name: str) -> None:
    case = readable(problem(**CASES[name]))
    assert max(errors(fused_joint(case, torch.float64), concatenated(case, torch.float64), case)) < 1e-12


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", CASES)
def test_close_in_float32(name: str) -> None:
    case = readable(problem(**CASES[name]))
    assert max(errors(fused_joint(case, torch.float32), concatenated(case, torch.float64), case)) < 3e-6


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_no_worse_than_twice_eager_attention(name: str) -> None:
    case = readable(problem(**CASES[name]))
    expected = concatenated(case, torch.float64)
    fused_errors = errors(fused_joint(case, torch.bfloat16), expected, case)
    for error, eager in zip(fused_errors, errors(concatenated(case, torch.bfloat16), expected, case), strict=True):
        assert error <= 2 * eager + 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masking", ["causal", "left", "right", "all"])
def test_the_tokens_alone(masking: str, dtype: torch.dtype) -> None:
    case = problem(masking=masking, rows=3)
    case.visible = torch.zeros(3, 1, 1, 10, dtype=torch.bool)  # the oracle sees no prefix
    readable(case)
    inputs = case.inputs(dtype)[:3]
    mask = case.mask if case.mask is None or case.mask.dtype == torch.bool else case.mask.to(dtype)
    out = token_attention(*inputs, case.scaling, mask=mask, causal=case.causal)
    assert out.is_contiguous()
    actual = [out.detach(), *torch.autograd.grad(out, inputs, case.grad_out.to(dtype))]
    expected = concatenated(case, torch.float64)[:4]
    found = max(errors(actual, expected, case))
    if dtype == torch.bfloat16:
        assert found <= 2 * max(errors(concatenated(case, dtype)[:4], expected, case))
    else:
        assert found < {torch.float64: 1e-12, torch.float32: 3e-6}[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "prefix"), [(17, 33), (1, 1), (128, 10), (2, 512), (512, 64)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("combine", [ZeroGate(opening=0.3), Ungated()])
def test_softmax_of_its_own(combine, groups: int, tokens: int, prefix: int, dtype: torch.dtype) -> None:
    """The keys and values of `as_softmax`, read fused, give the combine's equation and every gradient."""
    case = problem(groups=groups, tokens=tokens, prefix=prefix)

    def results(read, kind: torch.dtype) -> list[torch.Tensor]:
        query, _, _, key, value = case.inputs(torch.promote_types(kind, torch.float32))
        module = combine.build(4).to(query.dtype)
        out = read(module, query, key, value).transpose(1, 2)
        leaves = [query, key, value, *module.parameters()]
        return [out, *torch.autograd.grad(out, leaves, case.grad_out.to(out.dtype))]

    def equation(module, query, key, value):
        return module(query, torch.zeros_like(query), None, key, value, Scoring(case.scaling))[0]

    def fused(module, query, key, value):
        folded = (x.to(dtype)[None] for x in module.as_softmax(key[0], value[0]))
        return prefix_attention(query.to(dtype), *folded, case.scaling).transpose(1, 2)

    def eager(module, query, key, value):
        """Softmax in fp32, all else in `dtype`."""
        key, value = (x.to(dtype) for x in module.as_softmax(key[0], value[0]))
        key, value = (x.repeat_interleave(4 // x.shape[0], 0) for x in (key, value))
        scores = query.to(dtype) @ key.transpose(-1, -2) * case.scaling
        return scores.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype) @ value

    expected = results(equation, torch.float64)
    limit = {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype) or 2 * off(results(eager, dtype), expected)
    assert off(results(fused, dtype), expected) <= limit


def off(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest ‖actual − expected‖ / ‖expected‖; of a gradient that is 0, ‖actual‖."""
    pairs = zip(actual, expected, strict=True)
    return max(((one.double() - other).norm() / (other.norm() or 1)).item() for one, other in pairs)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("masking", ["causal", "left", "all"])
def test_gradcheck(masking: str, per_row: bool) -> None:
    case = problem(rows=2, tokens=3, prefix=2, width=4, masking=masking, per_row=per_row)
    if per_row:
        case.visible = torch.tensor([[True, False], [True, True]])[:, None, None]

    def joint(*inputs):
        return joint_attention(*inputs, case.scaling, mask=case.mask, causal=case.causal, visible=case.visible)

    inputs = case.inputs(torch.float64)
    assert torch.autograd.gradcheck(joint, inputs)
    assert torch.autograd.gradcheck(
        lambda q, k, v: prefix_attention(q, k, v, case.scaling, visible=case.visible), (inputs[0], *inputs[3:])
    )


def test_operators_are_registered_soundly() -> None:
    """Schema, shapes for tracing, and autograd, as PyTorch's own checker tests them."""
    for per_row in (False, True):
        case = problem(per_row=per_row, masking="left")
        inputs = case.inputs(torch.float32)
        arguments = (*inputs, case.mask, case.visible, False, 0.2)
        torch.library.opcheck(torch.ops.foreword.joint_attention.default, arguments)
        arguments = (inputs[0], *inputs[3:], case.visible, 0.2)
        torch.library.opcheck(torch.ops.foreword.prefix_attention.default, arguments)


def test_without_gradients_it_is_the_same() -> None:
    """The short way of a decoding step gives what the operator gives, in inference mode too."""
    case = problem(tokens=1, keys=40, masking="all")
    inputs = case.inputs(torch.float32)
    expected = joint_attention(*inputs, case.scaling)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(joint_attention(*inputs, case.scaling), expected)


@pytest.mark.usefixtures("path")
def test_causal_queries_before_the_empty_places_of_a_static_cache() -> None:
    """Query t sees keys 0 … t, whatever stands behind the last query."""
    case = problem(masking="causal", tokens=5)
    query, key, value, *prefix = case.inputs(torch.float32)
    wide = [torch.cat([x, torch.full_like(x, torch.nan)], 2) for x in (key, value)]
    out = joint_attention(query, *wide, *prefix, case.scaling, causal=True)
    torch.testing.assert_close(out, joint_attention(query, key, value, *prefix, case.scaling, causal=True))


def test_recomputed_under_checkpointing() -> None:
    case = problem(masking="left", prefix=10)

    def joint(*inputs):
        return joint_attention(*inputs, case.scaling, mask=case.mask)

    results = []
    for run in (joint, lambda *inputs: checkpoint(joint, *inputs, use_reentrant=False)):
        inputs = case.inputs(torch.float64)
        results.append(torch.autograd.grad(run(*inputs), inputs, case.grad_out))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_computes_in_its_dtype() -> None:
    case = problem()
    inputs = case.inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = joint_attention(*inputs, case.scaling, causal=True)
        alone = prefix_attention(inputs[0], *inputs[3:], case.scaling)
    assert out.dtype == alone.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert all(grad.dtype == torch.float32 for grad in grads)
    expected = joint_attention(*case.inputs(torch.bfloat16), case.scaling, causal=True)
    assert torch.equal(out, expected)


def test_nothing_is_kept_for_the_backward_but_inputs_output_and_lse() -> None:
    case = problem(tokens=128, prefix=512)
    inputs = case.inputs(torch.float32)
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = joint_attention(*inputs, case.scaling, causal=True)
    for tensor in (*inputs, out):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) == out.numel() // out.shape[-1]  # B·T·H
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        prefix_attention(inputs[0], *inputs[3:], case.scaling)
    for tensor in inputs:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert not kept


def test_the_tokens_are_not_differentiated_where_nothing_below_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem()
    query, key, value, *prefix = case.inputs(torch.float64)
    out = joint_attention(query.detach(), key.detach(), value.detach(), *prefix, case.scaling, causal=True)
    backward, keys = FlashCPU.backward, []
    monkeypatch.setattr(FlashCPU, "backward", lambda self, *a: keys.append(a[2].shape[2]) or backward(self, *a))
    grads = torch.autograd.grad(out, prefix, case.grad_out)
    assert keys == [10]  # those of the prefix
    for grad, expected in zip(grads, concatenated(case, torch.float64)[4:], strict=True):
        torch.testing.assert_close(grad, expected)
