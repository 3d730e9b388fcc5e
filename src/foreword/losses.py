"""Training losses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from .model.block_slot import NAME as SLOT
from .model.prompt import IGNORED, known_prompt

CHUNK = 128  # tokens whose logits exist at once


def completion_loss(
    model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None = None
) -> tuple[Tensor, Any]:
    """Cross-entropy of the learned tokens, with logits computed for no others, some of them at a time.

        L = −(1/N) Σ_{b,t: y_{b,t+1} learned} log softmax(logits_{b,t})[y_{b,t+1}]

    With 49,152 words of vocabulary the logits of a prompt cost more than the layers of a small model, and those of a
    long completion more memory than everything else. Where the logits are what the frozen head gives, they are made for
    `CHUNK` tokens at a time; elsewhere (a soft-cap, a scale, a trained or sharded head) for every column that some row
    learns.

    Args:
        model: a causal language model, possibly wrapped for distributed training.
        inputs: arguments of its forward, with `labels` (B, T) in which −100 marks tokens that are not learned.
        num_items: N, where a batch is accumulated over several calls; the number of learned tokens here by default.

    Returns:
        The loss and the model's outputs, whose logits are those of the tokens that were computed.
    """
    labels = inputs["labels"]
    targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # (B, T): the next token
    if num_items is None:
        num_items = (targets != IGNORED).sum().clamp(min=1)
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    with known_prompt(labels == IGNORED):  # the model itself is not given the labels
        total, outputs = by_chunks(model, rest, targets) if _has_plain_head(model) else by_columns(model, rest, targets)
    return total / num_items, outputs


def by_chunks(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> tuple[Tensor, Any]:
    """The sum of the loss over all learned tokens, from what enters the head."""
    head = _unwrapped(model).get_output_embeddings()
    with _one_token(head) as seen:
        outputs = model(**inputs, use_cache=False)
    if not torch.equal(outputs.logits, seen["logits"]):
        _dressed.add(_unwrapped(model))
        return by_columns(model, inputs, targets)
    learned = targets != IGNORED
    return ChunkedCrossEntropy.apply(seen["hidden"][learned], targets[learned], head), outputs


def by_columns(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> tuple[Tensor, Any]:
    """The sum of the loss over all learned tokens, from the model's own logits."""
    learned = targets != IGNORED
    logits, outputs = _learned_logits(model, inputs, learned)
    return nn.functional.cross_entropy(logits, targets[learned], reduction="sum"), outputs


def distillation_loss(
    model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None = None
) -> tuple[Tensor, Any]:
    """Cross-entropy of a student with what a teacher kept of its distributions (Eyuboglu et al. 2025).

        L = −(1/N) Σ_{learned b,t} Σ_{j ∈ top k of b,t} p_T(j) log softmax(logits_{b,t})[j]

    The teacher's k probabilities are not scaled up to 1: what they leave out pulls the student nowhere.

    Args:
        model: a causal language model, possibly wrapped for distributed training.
        inputs: arguments of its forward; `labels` (B, T), −100 where a token is not learned; and `teacher_ids` and
            `teacher_logprobs` (N, k), the teacher's tokens in the place of each of the N learned ones, row by row.
        num_items: N, where a batch is accumulated over several calls; the number of learned tokens here by default.

    Returns:
        The loss and the model's outputs, whose logits are those of the kept columns.
    """
    own = {"labels", "teacher_ids", "teacher_logprobs"}
    rest = {name: value for name, value in inputs.items() if name not in own}
    learned = nn.functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:] != IGNORED  # (B, T): the next token is
    logits, outputs = _learned_logits(model, rest, learned)
    student = logits.gather(1, inputs["teacher_ids"]) - logits.logsumexp(1, keepdim=True)  # (N, k)
    loss = -(inputs["teacher_logprobs"].exp() * student).sum()
    return loss / (len(logits) if num_items is None else num_items), outputs


def _learned_logits(model: nn.Module, inputs: dict[str, Any], learned: Tensor) -> tuple[Tensor, Any]:
    """Logits (N, V) in fp32 of the N learned places of (B, T), made for the columns that some row learns."""
    if keeps_logits(_unwrapped(model)):
        columns = learned.any(dim=0).nonzero().squeeze(1)
        inputs, learned = {**inputs, "logits_to_keep": columns}, learned[:, columns]
    outputs = model(**inputs, use_cache=False)
    return outputs.logits[learned].float(), outputs


def keeps_logits(model: PreTrainedModel) -> bool:
    """Whether the model's forward takes `logits_to_keep`, the columns to make logits for."""
    return "logits_to_keep" in inspect.signature(inspect.unwrap(type(model).forward)).parameters


class ChunkedCrossEntropy(torch.autograd.Function):
    """L = Σ_i −log softmax(W x_i)[y_i] for a frozen head W.

    The gradient ∂L/∂x_i = Wᵀ (softmax(W x_i) − e_{y_i}) is taken in the forward pass, while the logits of a chunk are
    there, so that they are computed once and never all at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, head: nn.Module) -> Tensor:
        """x (N, d), y (N,), and W as a module (N, d) → (N, V). Returns the sum in fp32."""
        learns = ctx.needs_input_grad[0]
        total = x.new_zeros((), dtype=torch.float32)
        gradients = []
        for some, words in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
            with torch.set_grad_enabled(learns):
                some = some.detach().requires_grad_(learns)
                loss = nn.functional.cross_entropy(head(some).float(), words, reduction="sum")
            if learns:
                gradients += torch.autograd.grad(loss, some)
            total += loss.detach()
        if learns:
            ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        [gradient] = ctx.saved_tensors
        return (scale * gradient).to(gradient.dtype), None, None


_dressed: WeakSet[nn.Module] = WeakSet()  # models that change the output of their head: a soft-cap, a scale


def _has_plain_head(model: nn.Module) -> bool:
    inner = _unwrapped(model)
    head = inner.get_output_embeddings()
    if head is None or inner in _dressed or not (inner is model or isinstance(model, DistributedDataParallel)):
        return False
    if hasattr(head, SLOT):  # an adapter changes what it gives
        return False
    return not any(parameter.requires_grad or isinstance(parameter, DTensor) for parameter in head.parameters())


def _unwrapped(model: Any) -> PreTrainedModel:
    return model if isinstance(model, PreTrainedModel) else model.module


@contextmanager
def _one_token(head: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within the block `head` computes one token only; what it was given and what it made are kept."""
    seen: dict[str, Tensor] = {}

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen["hidden"] = args[0]
        return (args[0][:1, -1:], *args[1:])

    def after(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
        seen["logits"] = logits

    handles = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
