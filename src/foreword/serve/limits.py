"""How much a server takes on."""

from dataclasses import dataclass

GIB = 2**30


@dataclass
class Limits:
    """What the engine takes on.

    Args:
        max_batch: requests that run at a time.
        max_queue: requests that wait; a further one is turned away.
        max_batch_tokens: tokens of one forward.
        cache_tokens: of the KV cache for all running requests together.
        context: longest prompt and answer together; None for the model's own.
        resident_bytes: budget for adapters on the model.
        memory_bytes: budget for adapters' numbers in (pinned) CPU memory.
    """

    max_batch: int = 32
    max_queue: int = 256
    max_batch_tokens: int = 512
    cache_tokens: int = 16384
    context: int | None = None
    resident_bytes: int = GIB
    memory_bytes: int = GIB
