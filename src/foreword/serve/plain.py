"""Requests through `generate`, an adapter for each row of a batch: for what continuous batching can't take."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..model.rows import rows
from .jobs import Failed, Job
from .sampler import Sampler


class Plain:
    """A thread that takes what waits, at most `max_batch` jobs, and runs it as one batch until its last job ends.

    Args:
        model: with its adapters.
        pad_id: token on the left of shorter prompts; the attention mask hides it.
        max_batch: rows of a batch.
    """

    def __init__(self, model: PreTrainedModel, *, pad_id: int, max_batch: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self._max_batch = max_batch
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Run a job; its tokens go to the job, which leaves with the last of its batch."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="foreword-plain", daemon=True)
                self._thread.start()
        self._waiting.put(job)

    def close(self) -> None:
        """End the thread after the batch that runs."""
        with self._lock:
            if self._thread is not None:
                self._waiting.put(None)
                self._thread.join()
                self._thread = None

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            batch = [job]
            while len(batch) < self._max_batch and not self._waiting.empty():
                job = self._waiting.get()
                if job is None:
                    self._waiting.put(None)
                    break
                batch.append(job)
            try:
                self._run(batch)
            finally:
                for job in batch:
                    job.leave()

    def _run(self, jobs: Sequence[Job]) -> None:
        """Continue jobs to their ends; where a batch raises an error, each by itself, so that only the guilty fail."""
        jobs = [job for job in jobs if job.finish is None]
        if not jobs:
            return
        try:
            self._generate(jobs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].fail(Failed(f"{type(error).__name__}: {error}"))
            else:
                for job in jobs:
                    self._run([job])

    @torch.no_grad()
    def _generate(self, jobs: Sequence[Job]) -> None:
        longest = max(job.decoding.max_tokens - len(job.generated) for job in jobs)
        with rows(self._model, [job.adapter for job in jobs], [job.decoding.streams for job in jobs]):
            self._model.generate(
                **self._inputs(jobs),
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=longest, eos_token_id=None, pad_token_id=self._pad_id
                ),
                logits_processor=LogitsProcessorList([Sampler(lambda: jobs)]),
                stopping_criteria=StoppingCriteriaList([_Ended(jobs)]),
            )

    def _inputs(self, jobs: Sequence[Job]) -> dict[str, Tensor]:
        """Prompts and answers so far, padded on the left; what an encoder reads is padded on the right."""
        if not self._model.config.is_encoder_decoder:
            return self._padded([job.ids for job in jobs])
        start = self._model.generation_config.decoder_start_token_id
        answers = self._padded([[start, *job.generated] for job in jobs])
        decoder = {f"decoder_{name}": tensor for name, tensor in answers.items()}
        return self._padded([job.prompt for job in jobs], left=False) | decoder

    def _padded(self, ids: Sequence[list[int]], left: bool = True) -> dict[str, Tensor]:
        width = max(map(len, ids))
        padded, mask = [], []
        for row in ids:
            pads, ones = [self._pad_id] * (width - len(row)), [1] * len(row)
            padded.append(pads + row if left else row + pads)
            mask.append([0] * len(pads) + ones if left else ones + [0] * len(pads))
        device = self._model.device
        return {"input_ids": torch.tensor(padded, device=device), "attention_mask": torch.tensor(mask, device=device)}


class _Ended(StoppingCriteria):
    """Which rows need no further token: their job has ended, or nobody waits for it."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([job.finish is not None for job in self._jobs], device=input_ids.device)
