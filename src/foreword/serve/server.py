"""Run the application until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import uvicorn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .app import build
from .engine import Engine, Limits
from .keys import Keys
from .service import Service

logger = logging.getLogger("foreword.serve")

KEEP_ALIVE = 75  # seconds; longer than clients and proxies keep a connection, lest one asks while it is being closed


class Server(uvicorn.Server):
    """uvicorn, which at the end lets requests finish for a while and then answers those that remain with an error."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._engine.drain(self._grace))
        await super().shutdown(sockets)
        await draining


async def serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    folder: Path | None,
    keys: Keys,
    limits: Limits,
    host: str,
    port: int,
    max_body: int,
    grace: float,
) -> None:
    """Serve a model and the adapters in `folder` until SIGINT or SIGTERM. Arguments: see `foreword serve --help`."""
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    engine = Engine(model, limits, pad_id=pad_id)
    if folder is not None:
        found = [one for one in engine.store.scan(folder) if one != name]
        if engine.store.get(name) is not None:
            engine.store.unregister(name)
            logger.warning("not served: the adapter folder %r is called like the base", name)
        logger.info("%d adapters in %s", len(found), folder)
    service = Service(engine, tokenizer, name, folder, keys, max_body)
    if host not in ("127.0.0.1", "::1", "localhost") and not keys:
        logger.warning("%s can be reached from other machines, and there are no API keys: see --keys", host)
    config = uvicorn.Config(
        build(service),
        host=host,
        port=port,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(grace) + 10,
    )
    server = Server(config, engine, grace)
    logger.info("http://%s:%d serves %s", host, port, name)
    try:
        await server.serve()
    finally:
        await engine.close()
