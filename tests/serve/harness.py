"""A tiny chat model with many adapters, what each answers alone, and a server on a free port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from transformers import PreTrainedModel

import foreword as fw
import tiny
from conformance import shake, small
from foreword.serve.app import build
from foreword.serve.engine import Engine
from foreword.serve.keys import Keys
from foreword.serve.limits import Limits
from foreword.serve.server import Server
from foreword.serve.service import Service

BASE = "tiny"
NEW = 12
METHODS = ["prefix-tuning", "zero-init", "deep-prompt", "prompt-tuning", "random-init", "parallel-adapter", "lora"]


def make_model() -> PreTrainedModel:
    """The tiny chat model with weights that make every adapter count."""
    model = tiny.model()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.config.name_or_path = BASE
    return model.eval()


def save_adapters(folder: Path, methods: list[fw.Method | str], *, start: int = 0) -> list[str]:
    """Adapters `a<number>` in `folder`, each with random numbers of its own."""
    model = make_model()
    names = []
    for number, method in enumerate(methods, start):
        adapter = fw.attach(model, small(method) if isinstance(method, str) else method, name=f"a{number}", seed=number)
        shake(adapter, seed=number, std=0.8)
        adapter.save(folder / adapter.name)
        fw.detach(model, adapter.name)
        names.append(adapter.name)
    return names


class Alone:
    """What each adapter answers, one request at a time, by `fw.load` and `generate`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model()
        self.tokenizer = tiny.tokenizer()

    def ids(self, prompt: str, adapter: str | None, new: int = NEW) -> list[int]:
        """The answer's tokens, whichever they are."""
        if adapter is not None:
            fw.load(self.model, self.folder / adapter, name="alone")
        ids = self.tokenizer(prompt, return_tensors="pt")
        out = self.model.generate(**ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        if adapter is not None:
            fw.detach(self.model, "alone")
        return out[0, ids["input_ids"].shape[1] :].tolist()

    def text(self, prompt: str, adapter: str | None, new: int = NEW) -> str:
        return self.tokenizer.decode(self.ids(prompt, adapter, new), skip_special_tokens=True)


@dataclass
class Running:
    """A server that listens."""

    url: str
    service: Service
    server: Server
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        return self.service.engine


@contextmanager
def running(
    folder: Path, *, limits: Limits | None = None, keys: Keys | None = None, grace: float = 5.0, **service
) -> Iterator[Running]:
    """Serve the tiny model and the adapters of `folder` from a thread."""
    engine = Engine(make_model(), limits or Limits(context=200, max_batch_tokens=64, cache_tokens=4096))
    engine.store.scan(folder)
    made = Service(engine, tiny.tokenizer(), BASE, folder, keys or Keys(), **service)
    config = uvicorn.Config(build(made), port=0, log_level="error", timeout_graceful_shutdown=10)
    server = Server(config, engine, grace)
    started = threading.Event()

    async def main() -> None:
        serving = asyncio.ensure_future(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        started.set()
        await serving
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(60)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", made, server, thread)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
