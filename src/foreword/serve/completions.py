"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ..data import to_text
from .answers import ChatForm, Form, TextForm
from .errors import Gone, api_error
from .jobs import Decoding
from .schema import ChatCompletion, Completing, Completion
from .service import Service
from .text import Piece, pieces

Result = TypeVar("Result")

DEFAULT_COMPLETION = 16  # tokens of /v1/completions, as OpenAI's; a chat answer may fill the context


def router(service: Service) -> APIRouter:
    """The completion routes."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions")
    async def chat(body: ChatCompletion, request: Request) -> Response:
        """Continue a conversation. `model` names the base or an adapter."""
        adapter = service.adapter(service.access(request), body.model)
        prompt = await _encode_chat(service, body)
        limit = body.max_completion_tokens or body.max_tokens or max(1, service.engine.context - len(prompt))
        top = (body.top_logprobs or 0) if body.logprobs else None
        return await _answer(service, request, body, [prompt], adapter, limit, top, ChatForm(service.tokenizer))

    @routes.post("/completions")
    async def complete(body: Completion, request: Request) -> Response:
        """Continue a text, or several. `model` names the base or an adapter."""
        adapter = service.adapter(service.access(request), body.model)
        prompts = await _encode_texts(service, body)
        limit = body.max_tokens or DEFAULT_COMPLETION
        form = TextForm(service.tokenizer)
        return await _answer(service, request, body, prompts, adapter, limit, body.logprobs, form)

    return routes


async def _encode_chat(service: Service, body: ChatCompletion) -> list[int]:
    def encode() -> list[int]:
        text, _ = to_text({"prompt": [message.plain() for message in body.messages]}, service.tokenizer)
        return service.tokenizer(text, add_special_tokens=False)["input_ids"]

    async with service.encoding:
        return await asyncio.to_thread(encode)


async def _encode_texts(service: Service, body: Completion) -> list[list[int]]:
    """Token ids of each prompt; a prompt may be ids already."""
    given: Any = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    prompts = given if several else [given]

    def encode() -> list[list[int]]:
        return [service.tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in prompts]

    async with service.encoding:
        encoded = await asyncio.to_thread(encode)
    for ids in encoded:
        service.require_ids(ids)
    return encoded


@dataclass
class Run:
    """The choices of one answer: n for each prompt, in OpenAI's order."""

    service: Service
    prompts: list[list[int]]
    choices: list[AsyncGenerator[Piece, None]]
    started: float = field(default_factory=time.monotonic)
    completion_tokens: int = 0

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(choice, piece) as they come."""
        async with aclosing(_merged(self.choices)) as merged:
            async for index, piece in merged:
                if not self.completion_tokens:
                    self.service.metrics.first_token.observe(time.monotonic() - self.started)
                    self.service.metrics.prompt_tokens.inc(self.prompt_tokens)
                self.completion_tokens += len(piece.tokens)
                self.service.metrics.generated_tokens.inc(len(piece.tokens))
                yield index, piece

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


async def _answer(
    service: Service,
    request: Request,
    body: Completing,
    prompts: list[list[int]],
    adapter: str | None,
    max_tokens: int,
    top_logprobs: int | None,
    form: Form,
) -> Response:
    decoding = Decoding(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        top_logprobs=top_logprobs,
        end_ids=frozenset() if body.ignore_eos else service.end_ids,
        streams=body.streams,
    )
    for prompt in prompts:
        service.engine.check(prompt, decoding)
    choices = [
        pieces(
            service.engine.generate(
                prompt, replace(decoding, seed=None if body.seed is None else body.seed + number), adapter
            ),
            service.tokenizer,
            body.stops,
        )
        for prompt in prompts
        for number in range(body.n or 1)
    ]
    run = Run(service, prompts, choices)
    header = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
    if not body.stream:
        answers = await _until_gone(request, _collect(run))
        listed = [form.choice(index, answer) for index, answer in enumerate(answers)]
        return JSONResponse(header | {"object": form.object, "choices": listed, "usage": run.usage})
    events = run.pieces()
    first = await _until_gone(request, anext(events))  # an error before it is an HTTP status
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    stream = _stream(run, first, events, form, header, include_usage)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _collect(run: Run) -> list[list[Piece]]:
    """Every choice in full."""
    answers: list[list[Piece]] = [[] for _ in run.choices]
    async with aclosing(run.pieces()) as events:
        async for index, piece in events:
            answers[index].append(piece)
    return answers


async def _stream(
    run: Run,
    first: tuple[int, Piece],
    events: AsyncGenerator[tuple[int, Piece], None],
    form: Form,
    header: dict[str, Any],
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """Server-sent events. A client that leaves closes this generator, and with it the requests."""
    header = header | {"object": form.chunk_object}
    usage: dict[str, Any] = {"usage": None} if include_usage else {}
    offsets = [0] * len(run.choices)

    def chunk(index: int, piece: Piece) -> bytes:
        choice = form.delta(index, piece, offsets[index])
        offsets[index] += len(piece.text)
        return _event(header | {"choices": [choice]} | usage)

    async with aclosing(events):
        try:
            for opening in form.opening(len(run.choices)):
                yield _event(header | {"choices": [opening]} | usage)
            yield chunk(*first)
            async for index, piece in events:
                yield chunk(index, piece)
        except Exception as error:
            yield _event(api_error(error).body)
        else:
            if include_usage:
                yield _event(header | {"choices": [], "usage": run.usage})
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def _until_gone(request: Request, answer: Awaitable[Result]) -> Result:
    """The answer; or, when the client leaves before it is there, its cancellation and `Gone`."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_departure(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _departure(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """(source, item) of several generators as they come; the first error ends all."""
    news: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

    async def pump(index: int, source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    news.put_nowait((index, item))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(index, source)) for index, source in enumerate(sources)]
    try:
        ended = 0
        while ended < len(tasks):
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended += 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
