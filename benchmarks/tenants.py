"""Many tenants on one base: throughput, memory, and what a thousand registered adapters add to a request.

    python -m benchmarks.tenants --output out/benchmarks

Each tenant has one request of the same length. "one batch" answers them together; "one by one" runs each tenant's
adapter by itself, which is how PEFT serves prompt methods. LoRA mixes tenants in a batch by PEFT's `adapter_names`.
"engine" is continuous batching over a paged cache, as the server runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import PreTrainedModel

import foreword as fw
from foreword.base import base
from foreword.measuring import cache_bytes
from foreword.serve.engine import Engine
from foreword.serve.jobs import Decoding
from foreword.serve.limits import GIB, Limits
from foreword.serve.store import Store

from .arms import twin
from .measuring import Report, interleave, ratio

FLOOR = "base, one batch"
ENGINE_FLOOR = "base, engine"
PEFT_PREFIX = "PEFT prefix tuning, one by one"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=32)
    parser.add_argument("--length", type=int, default=16, help="prefix length l")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    settings = {name: value for name, value in vars(options).items() if name not in ("output", "threads")}
    report = Report(settings)
    with tempfile.TemporaryDirectory() as folder:
        folders = save_tenants(load(options), options, Path(folder))
        throughput(report, folders, options)
        latency(report, folders, options)
    report.save(options.output, "tenants")


def load(options: argparse.Namespace) -> PreTrainedModel:
    """The base, each time on the same weights."""
    return twin(weights(options.dtype))


@functools.cache
def weights(dtype: str) -> PreTrainedModel:
    return base("smollm2", dtype=getattr(torch, dtype))[0]


def save_tenants(model: PreTrainedModel, options: argparse.Namespace, folder: Path) -> list[Path]:
    """One prefix adapter a tenant, in a folder each."""
    folders = []
    for number in range(options.tenants):
        method = fw.PrefixTuning(length=options.length, init="normal")
        folders.append(fw.attach(model, method, f"tenant{number}", seed=number).save(folder / f"tenant{number}"))
        fw.detach(model, f"tenant{number}")
    return folders


# ---------------------------------------------------------------------------------------------------------------------
# Throughput and memory


def throughput(report: Report, folders: list[Path], options: argparse.Namespace) -> None:
    ids = torch.randint(3, 49152, (options.tenants, options.prompt), generator=torch.Generator().manual_seed(0))
    bare, carrier, lora, prefix = load(options), load(options), load_lora(options), load_peft_prefix(options)
    names = [fw.load(carrier, path, path.name).name for path in folders]
    fw.set_active(carrier, None)
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(start(load(options), folders, options))

    def tenants() -> None:
        with fw.rows(carrier, names):
            generate(carrier, ids, options)

    def one_by_one(model: Any) -> Callable[[], None]:
        def run() -> None:
            for name, row in zip(names, ids, strict=True):
                model.set_adapter(name)
                generate(model, row[None], options)

        return run

    def through_engine(adapters: list[Any]) -> Callable[[], None]:
        return lambda: loop.run_until_complete(crowd(engine, ids, adapters, options))

    arms = {
        FLOOR: lambda: generate(bare, ids, options),
        "Foreword, one batch": tenants,
        "PEFT LoRA, one batch": lambda: generate(lora, ids, options, adapter_names=names),
        "PEFT LoRA, one by one": one_by_one(lora),
        PEFT_PREFIX: one_by_one(prefix),
        ENGINE_FLOOR: through_engine([None] * len(names)),
        "Foreword, engine": through_engine(names),
    }
    seconds = interleave(arms, options.repetitions, options.clock)
    tokens = options.tenants * options.new
    report.table(
        f"Throughput, {options.tenants} tenants: base's time over the arm's (quartiles)",
        ["arm", "tokens/s", "beside the base", "beside the engine's base", "beside PEFT one by one"],
        [
            [name, tokens / statistics.median(s), *(ratio(seconds[f], s) for f in (FLOOR, ENGINE_FLOOR, PEFT_PREFIX))]
            for name, s in seconds.items()
        ],
    )
    one = carrier.foreword.adapters[names[0]]
    lora_size = sum(p.numel() for name, p in lora.named_parameters() if f".{names[0]}." in name)
    with fw.rows(carrier, names):
        cached = bytes_a_sequence(carrier, ids)
    prefix.set_adapter(names[0])
    report.table(
        "Memory",
        ["arm", "numbers a tenant", "KV bytes a sequence"],
        [
            ["base", 0, bytes_a_sequence(bare, ids)],
            [f"Foreword, prefix l={options.length}", one.num_stored, cached],
            [f"PEFT prefix tuning l={options.length}", one.num_stored, bytes_a_sequence(prefix, ids)],
            [f"PEFT LoRA r={options.rank}", lora_size, bytes_a_sequence(lora, ids, adapter_names=names)],
        ],
    )
    loop.run_until_complete(engine.close())


def load_lora(options: argparse.Namespace) -> Any:
    """The base with a LoRA a tenant, whose B is random: PEFT may skip nothing."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=options.rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(load(options), config, adapter_name="tenant0")
    for number in range(1, options.tenants):
        model.add_adapter(f"tenant{number}", config)
    return model.eval()


def load_peft_prefix(options: argparse.Namespace) -> Any:
    """The base with a prefix of PEFT's a tenant."""
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=options.length)
    model = peft.get_peft_model(load(options), config, adapter_name="tenant0")
    for number in range(1, options.tenants):
        model.add_adapter(f"tenant{number}", config)
    return model.eval()


@torch.no_grad()
def generate(model: Any, ids: Tensor, options: argparse.Namespace, **kwargs: Any) -> None:
    length = {"max_new_tokens": options.new, "min_new_tokens": options.new, "do_sample": False}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **length, **kwargs)


@torch.no_grad()
def bytes_a_sequence(model: Any, ids: Tensor, **kwargs: Any) -> int:
    """Of KV cache behind a prompt."""
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **kwargs)
    return cache_bytes(output.past_key_values) // len(ids)


# ---------------------------------------------------------------------------------------------------------------------
# The engine


async def start(model: PreTrainedModel, folders: list[Path], options: argparse.Namespace) -> Engine:
    tokens = options.tenants * (options.prompt + options.new + 64)
    engine = Engine(model, Limits(max_batch=options.tenants, cache_tokens=tokens, resident_bytes=8 * GIB))
    for path in folders:
        engine.store.register(path.name, path)
    return engine


async def crowd(engine: Engine, ids: Tensor, adapters: list[str | None], options: argparse.Namespace) -> None:
    await asyncio.gather(
        *(ask(engine, row.tolist(), name, options.new) for row, name in zip(ids, adapters, strict=True))
    )


async def ask(engine: Engine, prompt: list[int], adapter: str | None, new: int) -> None:
    async for _ in engine.generate(prompt, Decoding(max_tokens=new), adapter):
        pass


def latency(report: Report, folders: list[Path], options: argparse.Namespace) -> None:
    """What a lease costs, with one registered adapter and with many."""
    few, many = (
        Store(load(options), resident_bytes=8 * GIB, memory_bytes=8 * GIB),
        Store(load(options), resident_bytes=8 * GIB, memory_bytes=8 * GIB),
    )
    few.register("tenant0", folders[0])
    for number in range(options.registered):
        many.register(f"tenant{number}", folders[number % len(folders)])
    for store in (few, many):
        store.release(store.lease("tenant0"))

    def resident(store: Store) -> float:
        return milliseconds(lambda: store.release(store.lease("tenant0")), 1000)

    numbers = iter(range(1, options.registered))
    from_disk = milliseconds(
        lambda: many.release(many.lease(f"tenant{next(numbers)}")), min(20, options.registered - 1)
    )
    few.resident_bytes = few.get("tenant0").size
    few.register("other", folders[-1])
    swap = milliseconds(lambda: [few.release(few.lease(name)) for name in ("other", "tenant0")], 10) / 2
    report.table(
        "Milliseconds that an adapter adds to a request (median)",
        ["adapter", "ms"],
        [
            ["resident, 1 registered", resident(few)],
            [f"resident, {options.registered} registered", resident(many)],
            ["comes from memory in another's place", swap],
            ["comes from disk", from_disk],
        ],
    )


def milliseconds(run: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return 1000 * statistics.median(taken)


if __name__ == "__main__":
    main()
