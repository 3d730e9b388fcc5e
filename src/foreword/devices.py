"""Where to compute."""

import torch


def fastest_device() -> torch.device:
    """The machine's accelerator (CUDA, ROCm, MPS, …) where it has one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found
