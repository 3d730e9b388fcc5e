"""The same costs measured: generation with P streams, and by wider models, on this machine."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ..measuring import cache_bytes, now
from ..methods.parscale import ParScale
from ..model.attach import attach
from ..model.rows import set_streams
from .cost import Shape, Workload

Run = tuple[float, float, int]  # seconds of the prefill and of decoding, bytes of the cache


@dataclass(frozen=True)
class Measured:
    """Median over rounds.

    Attributes:
        memory: bytes of weights, streams and KV cache at the end; activations are not counted.
        prefill, decode: seconds until the first new token, and from there to the last.
    """

    memory: int
    prefill: float
    decode: float

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode


def measure_streams(
    config: Any, streams: Sequence[int], work: Workload, rounds: int, dtype: torch.dtype
) -> dict[int, Measured]:
    """P → the cost of a model of `config` with random weights and P streams (P = 1 is the model alone)."""
    model = _random(config, dtype)
    weights = _bytes(model)
    method = ParScale(sorted({1, *streams}), work.length, init="normal")
    adapter = attach(model, method)
    own = dict(zip(method.sizes, (part.num_stored() for part in adapter.parts), strict=True))

    def generate(size: int) -> Run:
        set_streams(model, size)
        return _generate(model, work)

    runs = _interleaved({size: partial(generate, size) for size in method.sizes}, rounds)
    return {size: _median(runs[size], weights + own[size] * adapter.dtype.itemsize) for size in method.sizes}


def measure_wider(
    config: Any, factors: Sequence[float], work: Workload, rounds: int, dtype: torch.dtype
) -> dict[float, Measured]:
    """Factor → the cost of a model of `config` with that many times the parameters (`wider`), one at a time."""
    measured = {}
    for factor in factors:
        model = _random(wider(config, factor), dtype)
        runs = _interleaved({factor: partial(_generate, model, work)}, rounds)[factor]
        measured[factor] = _median(runs, _bytes(model))
        del model
    return measured


def wider(config: Any, factor: float) -> Any:
    """A config as deep and with as many heads, with about `factor` times the parameters in its layers."""
    shape = Shape.of(config).wider(factor)
    heads = config.num_attention_heads
    width = 2 * round(shape.query / heads / 2)  # of a head; even, for rotary embeddings
    changed = copy.deepcopy(config)
    changed.update({"hidden_size": heads * width, "intermediate_size": shape.intermediate, "head_dim": width})
    return changed


@torch.inference_mode()
def _generate(model: PreTrainedModel, work: Workload) -> Run:
    """Seconds of the prefill and of the decoding of `new` arbitrary tokens, and bytes of the cache."""
    ids = torch.arange(work.batch * work.prompt, device=model.device).view(work.batch, -1) % model.config.vocab_size
    cache = DynamicCache(config=model.config)
    start = now(model)
    token = model(ids, cache=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    middle = now(model)
    for _ in range(work.new - 1):
        token = model(token, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
    end = now(model)
    return middle - start, end - middle, cache_bytes(cache)


def _interleaved(arms: dict[Any, Callable[[], Run]], rounds: int) -> dict[Any, list[Run]]:
    """The runs of every arm: after one to warm up, each round runs all arms in turn."""
    runs: dict[Any, list[Run]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            run = arm()
            if turn > 0:
                runs[name].append(run)
    return runs


def _median(runs: list[Run], weights: int) -> Measured:
    prefill, decode, cache = zip(*runs, strict=True)
    return Measured(weights + cache[0], statistics.median(prefill), statistics.median(decode))


def _random(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def _bytes(model: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
