"""Replies to many prompts by the frozen model, through the engine that serves: continuous batching where it can."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.attach import set_active
from ..model.host import host_of
from ..serve.engine import Engine
from ..serve.jobs import Decoding
from ..serve.limits import Limits
from ..serve.text import end_ids


class Writer:
    """The engine and its event loop, for code that is not asynchronous. Close it when done: it is a context manager.

    Args:
        model: without an active adapter (see `base_only`).
        tokenizer: of the model.
        batch: replies to write at a time.
        longest: tokens of the longest prompt and reply together.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int, longest: int) -> None:
        self._loop = asyncio.new_event_loop()
        limits = Limits(max_batch=batch, max_queue=2**31, cache_tokens=(batch + 1) * longest, max_batch_tokens=2048)
        self._loop.run_until_complete(self._start(model, limits, tokenizer.pad_token_id or 0))
        self._end_ids = end_ids(model, tokenizer)

    async def _start(self, model: PreTrainedModel, limits: Limits, pad_id: int) -> None:
        self._engine = Engine(model, limits, pad_id=pad_id)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()

    def replies(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[list[int]]:
        """Token ids of the reply to each prompt, without the token that ends it. Prompt i samples with seed + i."""
        every = [replace(decoding, seed=(decoding.seed or 0) + i, end_ids=self._end_ids) for i in range(len(prompts))]

        async def reply(prompt: Sequence[int], decoding: Decoding) -> list[int]:
            return [token.id async for token in self._engine.generate(list(prompt), decoding)]

        async def run() -> list[list[int]]:
            return await asyncio.gather(*map(reply, prompts, every))

        return [[token for token in ids if token not in self._end_ids] for ids in self._loop.run_until_complete(run())]


@contextmanager
def base_only(model: PreTrainedModel) -> Iterator[None]:
    """Within the block no adapter is active; a model that came without one leaves without a trace."""
    host = host_of(model)
    active = host.active
    set_active(model, None)
    try:
        yield
    finally:
        set_active(model, active)
        host.leave_if_empty()
