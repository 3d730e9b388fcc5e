"""What the routes share: the engine, the tokenizer, the keys, the adapters folder, the numbers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request
from transformers import PreTrainedTokenizerBase

from ..errors import ForewordError
from .engine import Engine
from .errors import ApiError
from .keys import Access, Keys
from .leases import Unknown
from .metrics import Metrics
from .text import end_ids


@dataclass
class Service:
    """A running server's parts.

    Attributes:
        engine: runs requests.
        tokenizer: of the base.
        model_name: by which clients call the base without an adapter.
        folder: holds the adapters; nothing outside of it can be loaded. None where adapters can't be loaded at run
            time.
        keys: who may do what.
        max_body: bytes of a request's body.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    model_name: str
    folder: Path | None = None
    keys: Keys = field(default_factory=Keys)
    max_body: int = 2**20

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.metrics = Metrics(self.engine)
        self.encoding = asyncio.Lock()
        self.end_ids = end_ids(self.engine.model, self.tokenizer)

    def access(self, request: Request) -> Access:
        """What the caller may do. Raises `ApiError` 401 without a valid key."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        access = self.keys.access(key.strip() if scheme.lower() == "bearer" else None)
        if access is None:
            raise ApiError(
                401,
                "this server needs an API key: Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return access

    def adapter(self, access: Access, model: str) -> str | None:
        """The adapter that `model` names, or None for the base. For a caller, what it may not use does not exist."""
        if model == self.model_name and access.base:
            return None
        if model == self.model_name or not access.allows(model) or self.engine.store.get(model) is None:
            raise ApiError(404, f"the model {model!r} does not exist", param="model", code="model_not_found")
        return model

    def require_ids(self, ids: list[int]) -> None:
        """Raise `ApiError` where a prompt that came as token ids has one that the model doesn't know."""
        size = self.engine.model.config.get_text_config().vocab_size
        if wrong := [token for token in ids if token >= size]:
            raise ApiError(400, f"{wrong[0]} is no token id; they are 0 … {size - 1}", param="prompt")

    def names(self, access: Access) -> list[str]:
        """The adapters that exist for a caller."""
        return [name for name in self.engine.store.names if access.allows(name)]

    def register(self, access: Access, name: str, path: str | None) -> None:
        """Load an adapter at run time. Reads files: call it in a thread."""
        self._require_managed(access, name)
        if name == self.model_name:
            raise ApiError(400, f"{name!r} is the name of the base", param="lora_name")
        folder = self._confined(access, path or name)
        try:
            self.engine.store.register(name, folder)
        except ForewordError as error:
            raise ApiError(400, str(error).replace(f"{self.folder}/", ""), param="lora_path") from error

    def unregister(self, access: Access, name: str) -> None:
        """Unload an adapter; requests that use it finish. May wait for a forward: call it in a thread."""
        self._require_managed(access, name)
        self.engine.store.unregister(name)

    def _require_managed(self, access: Access, name: str) -> None:
        if not access.manage:
            raise ApiError(403, "this key may not load or unload adapters", kind="permission_error")
        if not access.allows(name):
            raise Unknown(name)

    def _confined(self, access: Access, path: str) -> Path:
        """A folder inside of the adapters folder, and of what the caller may use of it."""
        if self.folder is None:
            raise ApiError(403, "this server has no adapters folder", kind="permission_error")
        try:
            folder = (self.folder / path).resolve()
            inside = folder.relative_to(self.folder.resolve())
        except (ValueError, OSError) as error:
            raise ApiError(
                400, "lora_path must be a folder inside of the adapters folder", param="lora_path"
            ) from error
        if not inside.parts or not access.allows(inside.parts[0]):
            raise ApiError(404, f"there is no adapter folder {path!r}", param="lora_path")
        return folder
