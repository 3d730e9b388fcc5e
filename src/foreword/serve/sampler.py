"""The next token of each row of a batch, each row with its own settings and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from .jobs import Decoding, Job


class Sampler(LogitsProcessor):
    """Choose a token for every row, hand it to the row's job, and make it the argmax.

    Both ways of running the model then take the argmax, so rows that sample share a batch with rows that don't, and a
    seed means the same in any company. A sample is an argmax: argmax_i (s_i + g_i) with g_i = −log(−log u_i), u_i ~
    U(0, 1), has the probabilities softmax(s) (Gumbel 1954).

    Args:
        jobs: the job of each row of the batch that is running; None for a row that nobody waits for.
    """

    supports_continuous_batching = True

    def __init__(self, jobs: Callable[[], Sequence[Job | None]]) -> None:
        self._jobs = jobs

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores (B', V), the first B of them the jobs' → the same, altered in the rows that sample."""
        jobs = self._jobs()
        sampled = [(row, job) for row, job in enumerate(jobs) if job is not None and job.decoding.samples]
        chosen = scores.clone() if sampled else scores
        for row, sampling in sampled:
            chosen[row] = perturbed(scores[row].float(), sampling.decoding, sampling.generator(scores.device))
        tokens = chosen[: len(jobs)].argmax(-1).tolist()
        for row, (job, token) in enumerate(zip(jobs, tokens, strict=True)):
            if job is not None and job.finish is None:
                job.push(token, *_logprobs(scores[row], token, job.decoding.top_logprobs))
        return chosen


def perturbed(scores: Tensor, decoding: Decoding, generator: torch.Generator) -> Tensor:
    """Scores (V,) whose argmax is a sample at the job's temperature and top_p."""
    scores = scores / decoding.temperature
    if decoding.top_p < 1:
        scores = nucleus(scores, decoding.top_p)
    uniform = torch.rand(scores.shape, generator=generator, device=scores.device, dtype=torch.float64)
    return scores - torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16))).to(scores.dtype)


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Scores (V,) with −∞ for all but the fewest likeliest tokens that reach top_p together (Holtzman et al. 2020)."""
    ordered, index = scores.sort(descending=True)
    probability = ordered.softmax(-1)
    before = (probability.cumsum(-1) - probability)[1:]  # of the likelier tokens; the likeliest always stays
    return scores.index_fill(0, index[1:][before >= top_p], -torch.inf)


def _logprobs(scores: Tensor, token: int, top: int | None) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if top is None:
        return None, ()
    logprobs = scores.float().log_softmax(-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return logprobs[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True))
