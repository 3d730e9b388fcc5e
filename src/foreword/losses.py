"""Training losses."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .model.prompt import IGNORED, known_prompt


def completion_loss(
    model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None = None
) -> tuple[Tensor, Any]:
    """Cross-entropy of the learned tokens, with logits computed only in columns that some row learns.

        L = −(1/N) Σ_{b,t: y_{b,t+1} learned} log softmax(logits_{b,t})[y_{b,t+1}]

    Logits of prompts are never made: at 49,152 words of vocabulary they cost more than the layers of a small model.

    Args:
        model: a causal language model, possibly wrapped for distributed training.
        inputs: arguments of its forward, with `labels` (B, T) in which −100 marks tokens that are not learned.
        num_items: N, where a batch is accumulated over several calls; the number of learned tokens here by default.

    Returns:
        The loss and the model's outputs, whose logits are those of the kept columns.
    """
    labels = inputs["labels"]
    targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # (B, T): the next token
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    if _keeps_logits(model):
        columns = (targets != IGNORED).any(dim=0).nonzero().squeeze(1)
        rest["logits_to_keep"], targets = columns, targets[:, columns]
    with known_prompt(labels == IGNORED):  # the model itself is not given the labels
        outputs = model(**rest, use_cache=False)
    if num_items is None:
        num_items = (targets != IGNORED).sum().clamp(min=1)
    logits = outputs.logits.flatten(0, 1).float()
    loss = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss / num_items, outputs


def _keeps_logits(model: nn.Module) -> bool:
    inner = model.module if hasattr(model, "module") and isinstance(model.module, PreTrainedModel) else model
    return "logits_to_keep" in inspect.signature(inspect.unwrap(type(inner).forward)).parameters
