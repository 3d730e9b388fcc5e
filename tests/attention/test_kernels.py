"""A kernel is used where it reproduces a small problem, and nowhere else."""

import logging

import pytest
import torch

from foreword.attention import kernels
from foreword.attention.fused import joint_attention
from foreword.attention.kernels import EfficientCUDA, FlashCPU, FlashCUDA, additive, kernel_for, probe, repeat_heads

CPU = torch.device("cpu")


class WrongGradient(FlashCPU):
    """Forgets that the o and lse may be those of more keys than its own."""

    name = "wrong"

    def backward(self, grad_out, query, key, value, out, lse, mask, causal, scaling):
        out, lse = self.forward(query, key, value, mask, causal, scaling)
        return super().backward(grad_out, query, key, value, out, lse, mask, causal, scaling)


class IgnoresMask(FlashCPU):
    name = "ignores its mask"

    def forward(self, query, key, value, mask, causal, scaling):
        return super().forward(query, key, value, None, causal, scaling)


class Narrow(FlashCPU):
    name = "narrow"

    def forward(self, query, key, value, mask, causal, scaling):
        if query.shape[-1] > 32:
            raise RuntimeError("heads are at most 32 wide")
        return super().forward(query, key, value, mask, causal, scaling)


@pytest.fixture
def fresh_probes():
    kernel_for.cache_clear()
    yield
    kernel_for.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [4, 20, 64, 320])
@pytest.mark.parametrize("masked", [False, True])
def test_the_cpu_kernel_passes(dtype: torch.dtype, width: int, masked: bool) -> None:
    assert probe(FlashCPU(), CPU, dtype, width, masked) is None


@pytest.mark.parametrize("masked", [False, True])
def test_a_wrong_backward_is_found(masked: bool) -> None:
    assert "off by" in probe(WrongGradient(), CPU, torch.float32, 64, masked)


def test_an_ignored_mask_is_found() -> None:
    assert probe(IgnoresMask(), CPU, torch.float32, 64, False) is None
    assert "off by" in probe(IgnoresMask(), CPU, torch.float32, 64, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device")
@pytest.mark.parametrize("kernel", [FlashCUDA(), EfficientCUDA()])
def test_an_operator_without_its_device_is_found(kernel) -> None:
    assert probe(kernel, CPU, torch.float32, 64, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_serves_cuda(masked: bool) -> None:
    assert kernel_for("cuda", torch.bfloat16, 64, masked) is not None
    assert kernel_for("cuda", torch.float32, 64, masked) is not None


@pytest.mark.usefixtures("fresh_probes")
def test_the_next_kernel_is_tried_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = FlashCPU()
    monkeypatch.setitem(kernels.KERNELS, "cpu", (WrongGradient(), good))
    with caplog.at_level(logging.DEBUG, "foreword"):
        assert kernel_for("cpu", torch.float32, 64, False) is good
    assert "wrong is not used for torch.float32 of width 64 on cpu: it is off by" in caplog.text


@pytest.mark.usefixtures("fresh_probes")
def test_a_kernel_serves_the_widths_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = Narrow(), FlashCPU()
    monkeypatch.setitem(kernels.KERNELS, "cpu", (narrow, wide))
    assert kernel_for("cpu", torch.float32, 32, False) is narrow
    assert kernel_for("cpu", torch.float32, 64, False) is wide


@pytest.mark.usefixtures("fresh_probes")
def test_no_kernel_where_none_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.KERNELS, "cpu", (WrongGradient(),))
    assert kernel_for("cpu", torch.float32, 64, False) is None
    assert kernel_for("meta", torch.float32, 64, False) is None
    assert not kernels.is_fused("cpu", torch.float32, 64)


@pytest.mark.usefixtures("fresh_probes")
def test_probes_run_in_inference_mode() -> None:
    with torch.inference_mode():
        out = joint_attention(*(torch.ones(1, 2, 3, 4) for _ in range(5)), 1.0)
    torch.testing.assert_close(out, torch.ones(1, 3, 2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_without_infinity(dtype: torch.dtype) -> None:
    seen = torch.tensor([[True, False], [False, False]])[None, None]
    lowest = torch.finfo(dtype).min
    expected = torch.tensor([[0, lowest], [lowest, lowest]], dtype=dtype)[None, None]
    assert torch.equal(additive(seen, dtype), expected)
    assert torch.equal(additive(torch.zeros(seen.shape).masked_fill(~seen, -torch.inf), dtype), expected)
    assert additive(None, dtype) is None


def test_heads_are_repeated_side_by_side() -> None:
    heads = torch.arange(3.0).view(1, 3, 1, 1)
    assert repeat_heads(heads, 2).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert repeat_heads(heads, 1) is heads
