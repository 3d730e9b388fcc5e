"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..errors import ForewordError
from .jobs import Busy, Closing, Failed, Refused
from .leases import Unknown

logger = logging.getLogger("foreword.serve")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body = {"error": {key: text and text.encode(errors="replace").decode() for key, text in error.items()}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class Gone(Exception):
    """The client has left; nobody reads the answer."""


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, Unknown):
        return ApiError(404, str(error), code="model_not_found")
    if isinstance(error, ForewordError):
        return ApiError(400, str(error))
    if isinstance(error, Busy):
        retry = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded", headers=retry)
    if isinstance(error, Closing):
        return ApiError(503, str(error), kind="server_error", code="shutting_down", headers={"Retry-After": "10"})
    if isinstance(error, Failed):
        return ApiError(500, f"the model failed on this request: {error}", kind="server_error")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says more", kind="server_error")


def install(app: FastAPI) -> None:
    """Have every error of `app` answered in this shape."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    async def gone(request: Request, error: Exception) -> JSONResponse:
        return ApiError(499, "the client has left", kind="client_error").response()

    async def invalid(request: Request, error: Any) -> JSONResponse:
        first: dict[str, Any] = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{field}: {first['msg']}" if field else first["msg"]
        return ApiError(400, message, param=field or None).response()

    async def http(request: Request, error: Any) -> JSONResponse:
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response()

    handlers: dict[type[Exception], Any] = {Gone: gone, RequestValidationError: invalid, HTTPException: http}
    handlers |= dict.fromkeys((ApiError, ForewordError, Busy, Closing, Failed, Exception), known)
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
