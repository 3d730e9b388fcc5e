"""Where to compute."""

from typing import Any

import torch


def to_fastest(model: Any) -> None:
    """Move a model, with its adapters, to the machine's accelerator (CUDA, ROCm, MPS, …) where there is one."""
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
