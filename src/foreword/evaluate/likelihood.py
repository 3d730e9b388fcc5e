"""The log-likelihood of a continuation after a context, as choices and label words are scored by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.merge import full_precision
from ..errors import ForewordError
from ..generation import stderr
from ..losses import keeps_logits
from ..model.prompt import known_prompt


class Pair(NamedTuple):
    """Token ids of a context and of its continuation."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the model reads: all but the last token."""
        return (self.context + self.continuation)[:-1]


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, *, templated: bool) -> Pair:
    """Tokenise both as one text and cut it where the context ends, as lm-evaluation-harness does.

    Spaces at the end of a plain context go to the continuation, whose first word they belong to for most tokenizers.
    A context that a chat template has rendered (`templated`) stays as it is and gets no special tokens. An empty one
    becomes the beginning-of-text token.
    """
    if not templated:
        bare = context.rstrip()
        context, continuation = bare, context[len(bare) :] + continuation
    special = {"add_special_tokens": not templated}
    whole = tokenizer(context + continuation, **special)["input_ids"]
    start = len(tokenizer(context, **special)["input_ids"])
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return Pair(tuple(whole[:start]) or (first,), tuple(whole[start:]))


def loglikelihoods(
    model: PreTrainedModel, pairs: Sequence[Pair], *, batch_size: int = 16, description: str = "Scoring"
) -> list[float]:
    """log p(continuation | context) of each pair, in nats: Σ_t log softmax(logits_t)[token_{t+1}], in fp32.

    Pairs of one input are computed once: the one-token choices of a question cost one row. Rows of similar length
    share a batch, padded on the right, and logits are made only where a continuation is.

    Raises:
        ForewordError: a continuation has no tokens, a pair is longer than the positions of the model, or a
            log-likelihood is no finite number.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for number, pair in enumerate(pairs, 1):
        if not pair.continuation:
            raise ForewordError(f"continuation {number} has no tokens of its own after its context")
        if longest is not None and len(pair.inputs) > longest:
            raise ForewordError(f"pair {number} is {len(pair.inputs)} tokens long; the model reads at most {longest}")
    asking: dict[tuple[tuple[int, ...], int], list[int]] = {}  # one row → the pairs that it answers
    for index, pair in enumerate(pairs):
        asking.setdefault((pair.inputs, len(pair.context)), []).append(index)
    rows = sorted(asking, key=lambda row: len(row[0]), reverse=True)
    scores = [0.0] * len(pairs)
    for begin in track(range(0, len(rows), batch_size), description, console=stderr(), transient=True):
        batch = rows[begin : begin + batch_size]
        for (ids, start), logprobs in zip(batch, _logprobs(model, batch), strict=True):  # (n, V)
            for index in asking[ids, start]:
                targets = torch.tensor(pairs[index].continuation, device=logprobs.device)
                score = logprobs.gather(1, targets[:, None]).sum().item()
                scores[index] = finite(score, f"pair {index + 1}")
    return scores


def finite(score: float, what: str) -> float:
    """`score`, the log-likelihood of `what`. Raises `ForewordError` where it is NaN or infinite."""
    if not math.isfinite(score):
        raise ForewordError(
            f"the log-likelihood of {what} is {score}: the adapter has diverged or the dtype overflows; train at a "
            "lower learning_rate, or choose another dtype"
        )
    return score


@torch.no_grad()
def _logprobs(model: PreTrainedModel, rows: Sequence[tuple[tuple[int, ...], int]]) -> list[Tensor]:
    """For each row (ids, length of its context), log-probabilities (n, V) of the n tokens after its context."""
    width = max(len(ids) for ids, _ in rows)
    padded = torch.tensor([ids + (0,) * (width - len(ids)) for ids, _ in rows], device=model.device)  # (B, T)
    columns = torch.arange(width, device=model.device)
    lengths = torch.tensor([len(ids) for ids, _ in rows], device=model.device)[:, None]
    starts = torch.tensor([start for _, start in rows], device=model.device)[:, None]
    asked = (columns >= starts - 1) & (columns < lengths)  # (B, T): where a continuation's token is next
    kept = asked.any(0).nonzero().squeeze(1)
    arguments = {"logits_to_keep": kept} if keeps_logits(model) else {}
    with known_prompt(columns < starts):
        mask = (columns < lengths).long()
        logits = model(input_ids=padded, attention_mask=mask, use_cache=False, **arguments).logits
    if not arguments:
        logits = logits[:, kept]
    return [full_precision(row[where]).log_softmax(-1) for row, where in zip(logits, asked[:, kept], strict=True)]
