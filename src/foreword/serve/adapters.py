"""/v1/models and the adapters: listing, loading, unloading."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from .errors import ApiError
from .keys import Access
from .leases import Unknown
from .schema import LoadAdapter, UnloadAdapter
from .service import Service


def router(service: Service) -> APIRouter:
    """The routes for models and adapters. Each caller sees its own."""
    routes = APIRouter(prefix="/v1")

    def model(name: str) -> dict[str, Any]:
        parent = None if name == service.model_name else service.model_name
        return {"id": name, "object": "model", "created": service.created, "owned_by": "foreword", "parent": parent}

    def models(access: Access) -> list[str]:
        return [service.model_name] * access.base + service.names(access)

    def described(name: str, resident: set[str]) -> dict[str, Any]:
        registered = service.engine.store.get(name)
        if registered is None:  # unloaded a moment ago
            raise Unknown(name)
        return {
            "id": name,
            "object": "adapter",
            "methods": list(registered.methods),
            "bytes": registered.size,
            "resident": name in resident,
        }

    async def load(body: LoadAdapter, request: Request) -> dict[str, Any]:
        access = service.access(request)
        await asyncio.to_thread(service.register, access, body.lora_name, body.lora_path)
        return described(body.lora_name, set(service.engine.store.resident()))

    async def unload(name: str, request: Request) -> None:
        await asyncio.to_thread(service.unregister, service.access(request), name)

    @routes.get("/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """The base and the adapters."""
        return {"object": "list", "data": [model(name) for name in models(service.access(request))]}

    @routes.get("/models/{name:path}")
    async def get_model(name: str, request: Request) -> dict[str, Any]:
        """The base, or one adapter."""
        if name not in models(service.access(request)):
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
        return model(name)

    @routes.get("/adapters")
    async def list_adapters(request: Request) -> dict[str, Any]:
        """The adapters, their methods and sizes, and which are on the model now."""
        names, resident = service.names(service.access(request)), set(service.engine.store.resident())
        return {"object": "list", "data": [described(name, resident) for name in names]}

    @routes.post("/adapters")
    async def load_adapter(body: LoadAdapter, request: Request) -> dict[str, Any]:
        """Load an adapter from the adapters folder, in the place of what had its name."""
        return await load(body, request)

    @routes.delete("/adapters/{name:path}")
    async def delete_adapter(name: str, request: Request) -> dict[str, Any]:
        """Unload an adapter. Requests that use it finish; its folder stays."""
        await unload(name, request)
        return {"id": name, "object": "adapter", "deleted": True}

    @routes.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapter, request: Request) -> PlainTextResponse:
        """vLLM's name for POST /v1/adapters."""
        await load(body, request)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapter, request: Request) -> PlainTextResponse:
        """vLLM's name for DELETE /v1/adapters/{name}."""
        await unload(body.lora_name, request)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
