"""The HTTP application."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import adapters, completions, errors
from .errors import ApiError
from .metrics import Metrics
from .service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def build(service: Service) -> FastAPI:
    """The application of a service: OpenAI's routes, the adapters, /health, /metrics and the page at /."""
    app = FastAPI(title="foreword", version=version("foreword"), docs_url=None, redoc_url=None)
    errors.install(app)
    app.include_router(completions.router(service))
    app.include_router(adapters.router(service))
    page = (files("foreword.serve") / "page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while requests are taken, 503 during the shutdown."""
        closing = service.engine.closing
        return JSONResponse({"status": "closing" if closing else "ok"}, 503 if closing else 200)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    app.add_middleware(BodyLimit, max_body=service.max_body)
    app.add_middleware(Counted, metrics=service.metrics)
    return app


class BodyLimit:
    """Read a request's body before anything else does, and answer 413 where it is too long."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self.app = app
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        too_long = declared.isdigit() and int(declared) > self.max_body
        messages: list[Message] = []
        size, more = 0, not too_long
        while more and not too_long:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            too_long = size > self.max_body
            more = message.get("more_body", False)
        if too_long:
            error = ApiError(413, f"the body has more than {self.max_body:,} bytes", code="body_too_large")
            await error.response()(scope, receive, send)
            return
        replay = iter(messages)

        async def read_again() -> Message:
            return next(replay, None) or await receive()

        await self.app(scope, read_again, send)


class Counted:
    """Count answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            route: Any = scope.get("route")
            path = getattr(route, "path", "other")  # of the pattern, so that names don't become labels
            self.metrics.requests.labels(path, str(status)).inc()
