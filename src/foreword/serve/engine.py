"""Many requests on one model, each with its adapter: who may come in, in which order, and by which way they run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

from transformers import PreTrainedModel

from ..errors import ForewordError
from ..model.host import host_of
from ..model.stream_part import StreamPart
from .gate import Gate
from .jobs import Busy, Closing, Decoding, Job, Refused, Token
from .leases import Lease
from .limits import Limits
from .packed import Plans, obstacle
from .paged import Paged, obstacle_to_paging
from .plain import Plain
from .store import Store

logger = logging.getLogger("foreword.serve")


class Engine:
    """Run requests with any mix of adapters. Its methods belong to one event loop; the model runs in threads.

    Args:
        model: the frozen base.
        limits: what to take on.
        pad_id: token on the left of shorter prompts where requests run through `generate`.

    Attributes:
        store: the adapters.
        waiting, running: how many requests wait, and run.
        obstacle: why continuous batching can't run the model; None where it does.
    """

    def __init__(self, model: PreTrainedModel, limits: Limits | None = None, *, pad_id: int = 0) -> None:
        if not model.can_generate():
            raise ForewordError(f"{type(model).__name__} does not generate text")
        self.model = model
        self.limits = limits or Limits()
        host = host_of(model)
        self.obstacle = obstacle_to_paging(model)
        if self.obstacle is not None:
            logger.warning("every request runs through generate, because continuous batching can't: %s", self.obstacle)
        plans = Plans(host.adapters, model.device)
        self._plain = Plain(model, pad_id=pad_id, max_batch=self.limits.max_batch)
        self._paged = None
        if self.obstacle is None:
            self._paged = Paged(
                model,
                plans,
                max_batch=self.limits.max_batch,
                max_batch_tokens=self.limits.max_batch_tokens,
                cache_tokens=self.limits.cache_tokens,
                on_failure=self._plain.submit,
            )
        self._gate = Gate(host.layout.stacks)  # the last to hook itself in is the first to be called
        self.store = Store(
            model,
            resident_bytes=self.limits.resident_bytes,
            memory_bytes=self.limits.memory_bytes,
            gate=self._gate,
            on_eviction=plans.forget,
        )
        self.waiting = 0
        self.running: dict[str, Job] = {}
        self.closing = False
        self._over = False
        self._slots = asyncio.Semaphore(self.limits.max_batch)
        self._admission = asyncio.Lock()  # one at a time asks for a lease, so that nobody is passed over for room
        self._room = asyncio.Event()
        self._plain_methods: set[str] = set()  # that the log has named

    @property
    def context(self) -> int:
        """Longest prompt and answer together, in tokens."""
        own = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        longest = min(own, self.limits.cache_tokens) if self._paged else own
        return min(longest, self.limits.context or longest)

    def check(self, prompt: list[int], decoding: Decoding) -> None:
        """Raise `Refused` where a request can't fit, `Busy` where the queue is full, `Closing` at the end."""
        if not prompt:
            raise Refused("the prompt is empty")
        if len(prompt) + decoding.max_tokens > self.context:
            raise Refused(
                f"the prompt has {len(prompt)} tokens and the answer may have {decoding.max_tokens}; "
                f"together at most {self.context} fit"
            )
        if self.closing:
            raise Closing()
        if self.waiting >= self.limits.max_queue:
            raise Busy(retry_after=1 + len(self.running) // self.limits.max_batch)

    async def generate(
        self, prompt: list[int], decoding: Decoding, adapter: str | None = None
    ) -> AsyncGenerator[Token, None]:
        """The answer to a prompt, token by token. Closing the iterator cancels the rest.

        Args:
            prompt: token ids.
            decoding: how to continue them.
            adapter: a name of the store; None for the base.

        Raises:
            Refused, Busy, Closing: see `check`.
            ForewordError: there is no such adapter, or it can't be loaded.
            Failed: the model raised an error on this request.
        """
        self.check(prompt, decoding)
        job = await self._admit(prompt, decoding, adapter)
        try:
            async for token in job.tokens():
                yield token
        finally:
            job.cancel()
            if self._paged is not None:
                self._paged.drop(job)
            self.running.pop(job.id, None)

    async def _admit(self, prompt: list[int], decoding: Decoding, adapter: str | None) -> Job:
        """Wait for a place in the batch and for the adapter, and start."""
        self.waiting += 1
        try:
            await self._slots.acquire()
            try:
                lease = await self._lease(adapter)
                try:
                    self._require_streams(decoding.streams, lease)
                    self._require_positions(len(prompt) + decoding.max_tokens, lease)
                except Refused:
                    self.store.release(lease)
                    self._room.set()
                    raise
            except BaseException:
                self._slots.release()
                raise
        finally:
            self.waiting -= 1
        loop = asyncio.get_running_loop()

        def on_leave() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._left, lease)

        job = Job(prompt, decoding, lease.key, on_leave)
        self.running[job.id] = job
        if self._over:
            job.fail(Closing())
            job.leave()
        elif self._paged is not None and self._packs(lease):
            self._paged.submit(job)
        else:
            self._plain.submit(job)
        return job

    def _left(self, lease: Lease) -> None:
        """A job is out of the model."""
        self._slots.release()
        if self.store.release(lease):
            self._sweeping = asyncio.ensure_future(asyncio.to_thread(self.store.sweep))
        self._room.set()

    async def _lease(self, adapter: str | None) -> Lease:
        """A lease, in the order of asking. An adapter that is not on the model is loaded in a thread."""
        async with self._admission:
            lease = self.store.hold(adapter)
            while lease is None:
                self._room.clear()
                lease = await self._kept_if_cancelled(
                    asyncio.ensure_future(asyncio.to_thread(self.store.lease, adapter))
                )
                if lease is None:
                    await self._room.wait()
            return lease

    async def _kept_if_cancelled(self, leasing: asyncio.Future[Lease | None]) -> Lease | None:
        """The lease that a thread is getting; it is given back if nobody waits for it any more."""

        def give_back(done: asyncio.Future[Lease | None]) -> None:
            if done.exception() is None and (lease := done.result()) is not None:
                self.store.release(lease)
                self._room.set()

        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            leasing.add_done_callback(give_back)
            raise

    def _require_positions(self, length: int, lease: Lease) -> None:
        """Raise `Refused` where an adapter moves the text behind the last embedded position."""
        shift = 0 if lease.adapter is None else sum(part.shift for part in lease.adapter.parts)
        if shift and length + shift > self.context:
            raise Refused(f"prompt, answer and a prefix of {shift} have {length + shift} tokens; {self.context} fit")

    def _require_streams(self, streams: int | None, lease: Lease) -> None:
        """Raise `Refused` where an adapter has no set of that many parallel streams."""
        if streams is None:
            return
        sizes = [part.streams for part in lease.adapter.parts if isinstance(part, StreamPart)] if lease.adapter else []
        if streams not in sizes:
            has = f"has streams {', '.join(map(str, sizes))}" if sizes else "has no parallel streams"
            raise Refused(f"streams is {streams}; the model {has}")

    def _packs(self, lease: Lease) -> bool:
        reason = None if lease.adapter is None else obstacle(lease.adapter)
        if reason is not None and reason not in self._plain_methods:
            self._plain_methods.add(reason)
            logger.warning("requests run through generate rather than continuous batching: %s", reason)
        return reason is None

    # -----------------------------------------------------------------------------------------------------------------
    # The end

    async def drain(self, seconds: float) -> None:
        """Take no further request; let the others finish within `seconds`, and fail those that have not."""
        self.closing = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (self.running or self.waiting) and loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._over = True
        for job in list(self.running.values()):
            job.fail(Closing())
            if self._paged is not None:
                self._paged.drop(job)

    async def close(self) -> None:
        """Fail what runs, stop the threads, and leave the model with the adapters that are on it."""
        await self.drain(0)
        if self._paged is not None:
            await asyncio.to_thread(self._paged.close)
        await asyncio.to_thread(self._plain.close)
        self._gate.remove()
