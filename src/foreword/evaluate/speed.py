"""What an adapter costs at inference: time to the first token, decoding rate, memory, bytes."""

from __future__ import annotations

import resource
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..measuring import cache_bytes, now


@dataclass(frozen=True)
class Speed:
    """Medians over the repeats.

    Attributes:
        prompt_tokens, batch_size: what was read.
        first_token_ms: milliseconds until `generate` gives the first token: the prefill.
        decode_tokens_per_second: tokens of all rows after the first, greedy, with a KV cache.
        kv_cache_bytes: of the cache at the end, keys and values of all rows; prefixes take no room in it.
        peak_bytes: on a GPU, the most that PyTorch had allocated; elsewhere the most memory the process ever had.
        adapter_bytes: the size of the adapter's files; 0 for the base model.
    """

    prompt_tokens: int
    batch_size: int
    first_token_ms: float
    decode_tokens_per_second: float
    kv_cache_bytes: int
    peak_bytes: int
    adapter_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure_speed(
    model: PreTrainedModel,
    *,
    adapter: str | Path | None = None,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    batch_size: int = 1,
    repeats: int = 3,
    seed: int = 0,
) -> Speed:
    """Time `model`, with the adapter that is active on it, on prompts of seeded random tokens.

    Args:
        adapter: the folder whose size is reported.
        prompt_tokens, new_tokens: tokens to read and to write, per row.
        batch_size: rows.
        repeats: timed runs, after one that is not timed.
        seed: of the prompts.
    """
    vocabulary = model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (batch_size, prompt_tokens), generator=draw).to(model.device)  # (B, T)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    runs = [_run(model, ids, new_tokens) for _ in range(repeats + 1)][1:]
    firsts, rates, sizes = zip(*runs, strict=True)
    files = [] if adapter is None else [file for file in Path(adapter).glob("adapter*") if file.is_file()]
    return Speed(
        prompt_tokens=prompt_tokens,
        batch_size=batch_size,
        first_token_ms=round(1000 * statistics.median(firsts), 2),
        decode_tokens_per_second=round(statistics.median(rates), 2),
        kv_cache_bytes=sizes[0],
        peak_bytes=_peak(),
        adapter_bytes=sum(file.stat().st_size for file in files),
    )


def _run(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int) -> tuple[float, float, int]:
    """Seconds to the first token, tokens a second after it, bytes of the KV cache."""
    started = now(model)
    _generate(model, ids, 1)
    first = now(model)
    cache = _generate(model, ids, new_tokens).past_key_values
    prefill, whole = first - started, now(model) - first
    return prefill, (new_tokens - 1) * len(ids) / (whole - prefill), cache_bytes(cache)


def _generate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int) -> Any:
    """Exactly `new_tokens` greedy tokens after ids (B, T)."""
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB
