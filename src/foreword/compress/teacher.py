"""What the teacher would have said at every token of a conversation: the same model with the text in its context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..losses import keeps_logits

ROWS = 4  # of a forward: at a vocabulary of 150,000, logits for 200 tokens of each take half a gigabyte in fp32


@torch.no_grad()
def top_logprobs(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], learned: Sequence[int], k: int
) -> list[tuple[Tensor, Tensor]]:
    """The k likeliest tokens, and their log-probabilities, in the place of each of the last `learned` tokens.

    Args:
        sequences: token ids, each with the text in front of the conversation; of similar length.
        learned: how many last tokens of each the student learns.

    Returns:
        for each sequence, ids and log-probabilities (n, k) on the CPU, in fp32.
    """
    results: list[tuple[Tensor, Tensor]] = []
    for begin in range(0, len(sequences), ROWS):
        rows = list(zip(sequences[begin : begin + ROWS], learned[begin : begin + ROWS], strict=True))
        width = max(len(ids) for ids, _ in rows)
        padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in rows], device=model.device)
        lengths = torch.tensor([len(ids) for ids, _ in rows], device=model.device)[:, None]
        columns = torch.arange(width, device=model.device)
        firsts = lengths - torch.tensor([n for _, n in rows], device=model.device)[:, None]
        asked = (columns >= firsts - 1) & (columns < lengths - 1)  # (B, T): where the next token is learned
        kept = asked.any(0).nonzero().squeeze(1)
        only = {"logits_to_keep": kept} if keeps_logits(model) else {}
        mask = (columns < lengths).long()
        logits = model(input_ids=padded, attention_mask=mask, use_cache=False, **only).logits
        if not only:
            logits = logits[:, kept]
        for row, where in zip(logits, asked[:, kept], strict=True):
            values, tokens = row[where].float().log_softmax(-1).topk(min(k, row.shape[-1]))
            results.append((tokens.cpu(), values.cpu()))
    return results
