"""foreword serve"""

from __future__ import annotations

from ..serve.limits import Limits


def run(
    settings: Limits,
    model: str = "smollm2",
    adapters: str | None = None,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    keys: str | None = None,
    max_body: int = 2**20,
    grace: float = 30.0,
    dtype: str = "auto",
) -> None:
    """Serve one base with many adapters, by OpenAI's HTTP routes. A request's `model` names its adapter.

    Examples:
        foreword serve --adapters out
        foreword serve --model smollm2 --adapters out --keys keys.json --host 0.0.0.0
        curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"model": "support", "prompt":
        "Hello"}'

    Args:
        model: a Hub id, a local folder, or "smollm2".
        adapters: a folder of adapter folders; each is served under its folder's name.
        name: by which clients call the base; the last part of `model` by default.
        host: address to listen on; 127.0.0.1 can be reached from this machine alone.
        port: to listen on.
        keys: a JSON file of API keys with the adapters that each may use; the variable FOREWORD_API_KEYS can hold the
            same.
        max_body: bytes of a request's body.
        grace: seconds in which requests may finish at the end; those that remain are told that they failed.
        dtype: "auto", "float32", "bfloat16" or "float16".
    """
    import asyncio
    import logging
    from pathlib import Path

    from ..base import text_base
    from ..devices import to_fastest
    from ..errors import ForewordError
    from ..serve import require_extra

    require_extra()
    from ..serve.keys import read_keys
    from ..serve.server import serve

    logging.basicConfig(format="%(message)s")
    logging.getLogger("foreword.serve").setLevel(logging.INFO)
    given = read_keys(keys)
    folder = None if adapters is None else Path(adapters)
    if folder is not None and not folder.is_dir():
        raise ForewordError(f"there is no folder {adapters}")
    network, tokenizer = text_base(model, dtype=dtype)
    to_fastest(network)
    asyncio.run(
        serve(
            network,
            tokenizer,
            name=name or Path(model).name,
            folder=folder,
            keys=given,
            limits=settings,
            host=host,
            port=port,
            max_body=max_body,
            grace=grace,
        )
    )
