"""Numbers for Prometheus. None is labelled with an adapter or a key, so that they can be read without one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine import Engine

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The numbers of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "foreword_requests", "Requests answered, by route and HTTP status", ["route", "status"], registry=registry
        )
        self.prompt_tokens = Counter("foreword_prompt_tokens", "Tokens of prompts", registry=registry)
        self.generated_tokens = Counter("foreword_generated_tokens", "Tokens of answers", registry=registry)
        self.first_token = Histogram(
            "foreword_first_token_seconds", "From a request to its first token", buckets=SECONDS, registry=registry
        )
        live = {
            "foreword_queue_length": ("Requests that wait", lambda: engine.waiting),
            "foreword_batch_size": ("Requests that run", lambda: len(engine.running)),
            "foreword_registered_adapters": ("Adapters that can be used", lambda: len(engine.store.names)),
            "foreword_resident_adapters": ("Adapters on the model", lambda: len(engine.store.resident())),
            "foreword_resident_adapter_bytes": ("Their size", lambda: engine.store.bytes_resident),
        }
        for name, (text, value) in live.items():
            Gauge(name, text, registry=registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)
