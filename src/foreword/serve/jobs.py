"""One request on its way through the engine: what was asked, and the tokens that come back."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ..errors import ForewordError

_serial = itertools.count()
COLDEST = 1e-4  # a lower temperature takes the likeliest token


class Refused(ForewordError):
    """A request that the engine does not take: its prompt or answer can't fit."""


class Busy(Exception):
    """The queue is full.

    Attributes:
        retry_after: seconds after which to ask again.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class Closing(Exception):
    """The engine shuts down: it takes no request any more, and did not finish this one."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Failed(Exception):
    """The request failed by itself: its adapter or its numbers raised an error."""


@dataclass(frozen=True)
class Decoding:
    """How to continue a prompt.

    Args:
        max_tokens: longest answer.
        temperature: 0 takes the likeliest token at every step; above 0 samples.
        top_p: sample from the likeliest tokens of this total probability.
        seed: of the sampling; None draws one. The same seed gives the same answer in any batch.
        top_logprobs: for this many of the likeliest tokens, and the chosen one, give log-probabilities; None for none.
        end_ids: tokens that end the answer.
        streams: P, for an adapter of parallel streams; None takes its largest.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int | None = None
    end_ids: frozenset[int] = frozenset()
    streams: int | None = None

    @property
    def samples(self) -> bool:
        """Whether there is a temperature that fp32 scores can be divided by."""
        return self.temperature >= COLDEST


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        id: its number in the vocabulary.
        logprob: log-probability under the model, before temperature and top_p; None unless asked for.
        top: the likeliest tokens there and their log-probabilities.
        finish: "stop" or "length" on the last token.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: str | None = None


@dataclass(eq=False)
class Job:
    """A prompt, its adapter, and its answer so far. Made on an event loop, filled from the thread that runs the model.

    Attributes:
        prompt: token ids.
        decoding: how to continue them.
        adapter: name under which the adapter is on the model; None is the base.
        on_leave: called once, from any thread, when no forward will read the adapter for this job any more.
        generated: the answer's token ids.
        finish: why it ended; None while it runs.
    """

    prompt: list[int]
    decoding: Decoding
    adapter: str | None = None
    on_leave: Callable[[], None] = lambda: None
    generated: list[int] = field(default_factory=list)
    finish: str | None = None

    def __post_init__(self) -> None:
        self.id = f"job-{next(_serial)}"
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[Token | Exception] = asyncio.Queue()
        seed = self.decoding.seed
        self._seed = secrets.randbits(63) if seed is None else seed
        self._generator: torch.Generator | None = None

    @property
    def ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt + self.generated

    def generator(self, device: torch.device) -> torch.Generator:
        """Of the job's own random numbers."""
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self._seed % 2**63)
        return self._generator

    def push(self, token: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> None:
        """The next token of the answer; the job knows whether it is the last."""
        self.generated.append(token)
        if token in self.decoding.end_ids:
            self.finish = "stop"
        elif len(self.generated) >= self.decoding.max_tokens:
            self.finish = "length"
        self._tell(Token(token, logprob, top, self.finish))

    def fail(self, error: Exception) -> None:
        """End the job with an error, unless it ended already."""
        if self.finish is None:
            self.finish = "error"
            self._tell(error)

    def cancel(self) -> None:
        """Nobody waits for the rest."""
        self.finish = self.finish or "cancelled"

    def leave(self) -> None:
        """No forward will read the job's adapter any more."""
        on_leave, self.on_leave = self.on_leave, lambda: None
        on_leave()

    async def tokens(self) -> AsyncIterator[Token]:
        """The answer as it comes. Raises what the job failed with."""
        while True:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            yield news
            if news.finish is not None:
                return

    def _tell(self, news: Token | Exception) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)
