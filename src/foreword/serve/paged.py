"""Requests through transformers' continuous batching, each with its adapter.

`ContinuousBatchingManager` schedules, pages the KV cache and runs the model in a thread of its own. Three things are
added, and this file is the only one that knows its insides: the plan of each packed forward, the choice of each token
(`Sampler`), and where results go. KV blocks are never shared between requests: a block holds what an adapter made of
the tokens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..model.host import Host, host_of
from .jobs import Decoding, Job
from .packed import PackedPlan, Plans
from .sampler import Sampler

logger = logging.getLogger("foreword.serve")

PAGE = 32  # tokens of a KV block
ROUNDING = 4  # units in the last place of the largest logit, by which two ways to compute may differ
_SETTINGS: dict[str, Any] = {
    "page_size": PAGE,
    "allow_block_sharing": False,
    "use_async_batching": False,  # the plan of a forward is made from the requests of that forward
    "use_cuda_graph": False,
    "auto_switch_to_flash": False,
}


class Paged:
    """Continuous batching on one model.

    Args:
        model: with its adapters; one that `obstacle_to_paging` has nothing against.
        max_batch: requests of a batch.
        max_batch_tokens: tokens of a forward; longer prompts are read in several.
        cache_tokens: of the paged KV cache.
        on_failure: called with a job that was in a forward that raised an error, from the thread that ran it. The job
            has not left.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plans: Plans,
        *,
        max_batch: int,
        max_batch_tokens: int,
        cache_tokens: int,
        on_failure: Callable[[Job], None],
    ) -> None:
        self._host: Host = host_of(model)
        self._plans = plans
        self._on_failure = on_failure
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()  # of starting and stopping
        self._manager: ContinuousBatchingManager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                **_SETTINGS,
                num_blocks=-(-cache_tokens // PAGE),
                max_batch_tokens=max_batch_tokens,
                max_requests_per_batch=max_batch,
            ),
        )
        self._manager.logit_processor = ContinuousBatchingLogitsProcessorList(
            LogitsProcessorList([Sampler(self._running_with_new_token)])
        )
        self._manager.output_router = _Results(self._failed)
        self._handles = [
            stack.register_forward_pre_hook(self._plan, with_kwargs=True, prepend=True)
            for stack in self._host.layout.stacks
        ]

    def submit(self, job: Job) -> None:
        """Run a job; its tokens go to the job."""
        self._jobs[job.id] = job
        with self._lock:
            self._revive()
            self._manager.add_request(job.ids, request_id=job.id, **_limits(job.decoding, len(job.generated)))

    def drop(self, job: Job) -> None:
        """Have no more to do with a job that has ended or been cancelled."""
        if self._jobs.pop(job.id, None) is not None:
            if job.finish not in ("stop", "length"):
                self._manager.cancel_request(job.id)
            job.leave()  # a forward that still packs it reads the base in its place

    def close(self) -> None:
        """Stop the thread, and take the hooks off the model. Jobs that run are not told."""
        with self._lock:
            self._jobs.clear()
            if self._manager.is_running():
                self._manager.stop(block=True, hard_stop=True)
            for handle in self._handles:
                handle.remove()

    def _revive(self) -> None:
        """Start the manager's thread where there is none, or it is about to end because a forward raised an error."""
        if self._manager.is_running():
            if self._manager.background_thread_status.can_accept_new_requests() is None:
                return
            self._manager.join(perf_counter())
        self._manager.start()

    # -----------------------------------------------------------------------------------------------------------------
    # In the manager's thread

    def _requests(self) -> list[Any]:
        """The requests of the batch that is running, in the order in which they are packed."""
        processor: Any = self._manager.batch_processor
        return processor.inputs_and_outputs.requests_in_batch

    def _running_with_new_token(self) -> list[Job | None]:
        return [self._jobs.get(request.state.request_id) for request in self._requests() if request.has_new_token]

    def _plan(self, stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook of a stack: the plan of a packed batch, and positions behind what adapters put in front."""
        if "cu_seq_lens_q" not in kwargs:
            return None
        jobs = [self._jobs.get(request.state.request_id) for request in self._requests()]
        names = [None if job is None else job.adapter for job in jobs]  # a dropped job's adapter may have left
        if not any(names):
            return None
        bounds = kwargs["cu_seq_lens_q"].tolist()
        added: dict[str, Any] = {"foreword": PackedPlan.of(names, bounds, self._plans)}
        shifts = [self._shift(name) for name in names]
        if any(shifts):
            shift = [by for by, (start, end) in zip(shifts, pairwise(bounds), strict=True) for _ in range(start, end)]
            added["position_ids"] = kwargs["position_ids"] + torch.tensor(shift, device=kwargs["position_ids"].device)
        return args, {**kwargs, **added}

    def _shift(self, name: str | None) -> int:
        return 0 if name is None else sum(part.shift for part in self._host.adapters[name].parts)

    def _failed(self, request_id: str, error: str) -> None:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            logger.warning("continuous batching failed on %s: %s", request_id, error)
            self._on_failure(job)


class _Results(OutputRouter):
    """Where the manager's results go. Tokens have reached their jobs through the sampler; only failures are news."""

    def __init__(self, on_failure: Callable[[str, str], None]) -> None:
        super().__init__()
        self._on_failure = on_failure

    def deliver(self, output: GenerationOutput) -> None:
        if output.error is not None:
            self._on_failure(output.request_id, output.error)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)


def _limits(decoding: Decoding, done: int) -> dict[str, Any]:
    """The manager must end a request where its job ends."""
    return {"max_new_tokens": decoding.max_tokens - done, "eos_token_id": sorted(decoding.end_ids) or -1}


def obstacle_to_paging(model: PreTrainedModel) -> str | None:
    """Why continuous batching can't run a model; None where it can. Runs the model on two short prompts to see."""
    layout = host_of(model).layout
    implementation = model.config._attn_implementation
    if not layout.decoder_only:
        return f"{type(model).__name__} is no causal language model"
    if layout.stateful or layout.skipped:
        return f"{type(model).__name__} has layers without attention"
    if implementation != "sdpa":
        return f"its attention is {implementation!r}, and adapters in a packed batch need 'sdpa'"
    return _difference(model)


@torch.no_grad()
def _difference(model: PreTrainedModel) -> str | None:
    """What a packed batch of two prompts says that the model, run on each alone, would not.

    Token by token, each may be second to the likeliest by what rounding explains: in bf16 two logits are often equal.
    """
    vocabulary = model.config.get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (14,), generator=torch.Generator().manual_seed(0)).split([5, 9])
    prompts = [prompt.tolist() for prompt in prompts]
    settings = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    small = ContinuousBatchingConfig(**_SETTINGS, num_blocks=16, max_batch_tokens=32)
    try:
        with _silenced("ContinuousBatchingLogger"):
            outputs = model.generate_batch(
                prompts,
                generation_config=GenerationConfig(eos_token_id=-1, **settings),
                continuous_batching_config=small,
                warmup=False,
            ).values()
    except Exception as error:
        return f"continuous batching raised {type(error).__name__}: {error}"
    if errors := [output.error for output in outputs if output.error]:
        return f"continuous batching failed: {errors[0]}"
    for prompt, output in zip(prompts, outputs, strict=True):
        said = torch.tensor(output.generated_tokens, device=model.device)
        row = torch.tensor([prompt], device=model.device)
        logits = model(torch.cat([row, said[None]], 1)).logits[0, len(prompt) - 1 : -1].float()  # (8, V)
        behind = logits.amax(-1) - logits.gather(1, said[:, None]).squeeze(1)
        if (behind > ROUNDING * torch.finfo(model.dtype).eps * logits.abs().amax(-1)).any():
            return f"continuous batching answers {said.tolist()} where the model says {logits.argmax(-1).tolist()}"
    return None


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Without what a library's logger says of an error that is handled here."""
    library = logging.getLogger(name)
    level = library.level
    library.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        library.setLevel(level)
