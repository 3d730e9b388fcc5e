"""What a model costs: seconds, and bytes of its cache."""

import time
from collections.abc import Callable
from typing import Any

import torch


def now(model: Any) -> float:
    """Seconds on a clock, once the GPU that a model is on, if it is on one, has done what it was asked."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def interleave(
    arms: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float], warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each arm in each round. Every round runs every arm once, each time from the next arm on."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(-warmup, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            arms[name]()
            if turn >= 0:
                seconds[name].append(clock() - start)
    return seconds


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a KV cache of transformers; a layer without them (state-space) counts none."""
    states = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in states if tensor is not None)
