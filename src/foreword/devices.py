"""Where to compute, and when that is done."""

import time
from typing import Any

import torch


def to_fastest(model: Any) -> None:
    """Move a model, with its adapters, to the machine's accelerator (CUDA, ROCm, MPS, …) where there is one."""
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())


def now(model: Any) -> float:
    """Seconds on a clock, once the GPU that a model is on, if it is on one, has done what it was asked."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
