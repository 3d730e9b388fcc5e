"""What a method costs on a model on this machine: a training step and a decoding step, beside the frozen model's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .attention.readers import watch_paths
from .losses import completion_loss
from .measuring import interleave, now
from .model.adapter import Adapter
from .model.attach import attach, detach, set_active
from .space import Method

Choice = Method | str | Sequence[Method | str]  # one adapter: a method, its name, or several that compose

FROZEN = "frozen model"
STEPS = 8  # tokens decoded in a round


@dataclass(frozen=True)
class Cost:
    """Medians over rounds.

    Attributes:
        step, decode: seconds of a training step (forward and backward of the loss) and of decoding a token of each row.
        step_ratio, decode_ratio: the same over the frozen model's in the same round.
    """

    step: float
    step_ratio: float
    decode: float
    decode_ratio: float


def bench(
    model: PreTrainedModel, methods: Sequence[Choice], *, rows: int = 4, tokens: int = 128, rounds: int = 8
) -> dict[str, Cost]:
    """Method → what it costs, and the frozen model under `FROZEN`.

    A training step of the frozen model is one whose only differentiable tensor is the output of its input embedding:
    the least that any method below the lowest layer could cost. All arms take turns in every round.

    Args:
        model: a causal language model without adapters.
        methods: of the registry, configured, or compositions.
        rows, tokens: of a batch of arbitrary tokens.
        rounds: measurements of each arm after one to warm up.

    Raises:
        ForewordError: a method can't be attached.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0)).to(model.device)
    with _attached(model, methods) as adapters:
        stepped, decoded = _timed(model, adapters, ids, rounds)
    return {
        label: Cost(
            step=statistics.median(stepped[label]),
            step_ratio=_ratio(stepped[label], stepped[FROZEN]),
            decode=statistics.median(decoded[label]) / STEPS,
            decode_ratio=_ratio(decoded[label], decoded[FROZEN]),
        )
        for label in stepped
    }


def _timed(
    model: PreTrainedModel, adapters: dict[str, Adapter], ids: Tensor, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each arm in each round: of a training step, and of decoding `STEPS` tokens."""
    embedded = model.get_input_embeddings()(ids).detach()
    steps: dict[str, Callable[[], Any]] = {FROZEN: lambda: _frozen_step(model, embedded, ids)}
    decoders: dict[str, Callable[[], Any]] = {FROZEN: _decoder(model, None, ids)}
    for label, adapter in adapters.items():
        steps[label] = partial(_step, adapter, ids)
        decoders[label] = _decoder(model, adapter.name, ids)
    clock = partial(now, model)
    return interleave(steps, rounds, clock), interleave(decoders, rounds, clock)


def kernel_paths(model: PreTrainedModel, methods: Sequence[Choice], *, tokens: int = 16) -> list[dict[str, Any]]:
    """The path of every attention module in a training step and in a decoding step, sites of equal paths together.

    A row has the method, the kind of attention, the numbers of the layers, and the path of each: "fused", or
    "reference: " and the reason; "–" where the module reads no adapter.
    """
    ids = torch.arange(2 * tokens, device=model.device).view(2, -1) % model.config.get_text_config().vocab_size
    with _attached(model, methods) as adapters:
        return [row for label, adapter in adapters.items() for row in _paths(label, adapter, ids)]


def _paths(label: str, adapter: Adapter, ids: Tensor) -> list[dict[str, Any]]:
    with watch_paths() as trained:
        _step(adapter, ids)
    with watch_paths() as decoded:
        _decoder(adapter.model, adapter.name, ids)()
    alike: dict[tuple[str, str, str], list[int]] = {}
    for site in adapter.host.layout.sites:
        paths = (trained.get(site.module, "–"), decoded.get(site.module, "–"))
        alike.setdefault((site.kind, *paths), []).append(site.layer)
    return [
        {"method": label, "attention": kind, "layers": _ranges(layers), "training": training, "decoding": decoding}
        for (kind, training, decoding), layers in alike.items()
    ]


@contextmanager
def _attached(model: PreTrainedModel, methods: Sequence[Choice]) -> Iterator[dict[str, Adapter]]:
    """Label → adapter, for as long as they are measured."""
    made: dict[str, Adapter] = {}
    try:
        for number, method in enumerate(methods):
            adapter = attach(model, method, f"bench-{number}")
            label = " + ".join(one.name for one in adapter.methods)
            made[label if label not in made else f"{label} ({number + 1})"] = adapter
        yield made
    finally:
        for adapter in made.values():
            detach(model, adapter.name)


def _frozen_step(model: PreTrainedModel, embedded: Tensor, ids: Tensor) -> None:
    set_active(model, None)
    completion_loss(model, {"inputs_embeds": embedded.requires_grad_(), "labels": ids})[0].backward()
    embedded.grad = None


def _step(adapter: Adapter, ids: Tensor) -> None:
    """Forward and backward of the loss."""
    set_active(adapter.model, adapter.name)
    completion_loss(adapter.model, {"input_ids": ids, "labels": ids})[0].backward()
    for parameter in adapter.trainable_parameters:
        parameter.grad = None


@torch.no_grad()
def _decoder(model: PreTrainedModel, adapter: str | None, ids: Tensor) -> Callable[[], None]:
    """A function that decodes `STEPS` more tokens behind `ids` each time it is called."""
    cache = DynamicCache(config=model.config)
    set_active(model, adapter)
    token = model(ids, cache=cache).logits[:, -1].argmax(-1, keepdim=True)

    @torch.no_grad()
    def decode() -> None:
        nonlocal token
        set_active(model, adapter)
        for _ in range(STEPS):
            token = model(token, cache=cache).logits[:, -1].argmax(-1, keepdim=True)

    return decode


def _ratio(seconds: list[float], floor: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, floor, strict=True))


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0–2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
