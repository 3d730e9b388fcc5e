"""Decoding: time of a step beside the base's, and bytes of KV cache for each sequence.

    python -m benchmarks.decode --output out/benchmarks

Each arm prefills the same prompt, which says how large its cache is; then all decode greedily on the base's dynamic
cache, so that none differs by where its cache lies in memory. "tenants" is one batch whose every row reads another
adapter.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

import foreword as fw
from foreword.base import base
from foreword.measuring import cache_bytes

from .arms import FLOOR, twin
from .measuring import Report, interleave, keep_memory, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[30], help="prefix lengths l")
    parser.add_argument("--tenant-length", type=int, default=16, help="l of each tenant's prefix")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=4, help="tokens decoded in each repetition")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()

    report = Report({"prompt": options.prompt, "steps": options.steps, "clock": options.clock})
    for dtype in options.dtypes:
        model = base("smollm2", dtype=getattr(torch, dtype))[0]
        carrier = twin(model)
        contexts = attach(carrier, options)
        for batch in options.batches:
            floor = Decoder(model, contextlib.nullcontext, batch, options)
            decoders = {FLOOR: floor}
            for name, context in contexts.items():
                decoders[name] = Decoder(carrier, context(batch), batch, options)
                decoders[name].cache = floor.cache
            seconds = interleave(decoders, options.repetitions, options.clock)
            report.table(
                f"Decoding, batch {batch}, {dtype}: base's time over the arm's",
                ["arm", "ms a step", "speed (quartiles)", "KV bytes a sequence"],
                [
                    [
                        name,
                        1000 * sorted(s)[len(s) // 2] / options.steps,
                        ratio(seconds[FLOOR], s),
                        decoders[name].cache_bytes // batch,
                    ]
                    for name, s in seconds.items()
                ],
            )
        report.save(options.output, "decode")


def attach(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """Arm → batch size → what makes the context in which it decodes."""
    contexts: dict[str, Callable[[int], Callable[[], Any]]] = {}
    methods = {f"prefix-tuning l={n}": fw.PrefixTuning(length=n, init="normal") for n in options.lengths}
    methods |= {f"zero-init l={n}": fw.ZeroInit(length=n, layers=None, opening=0.5) for n in options.lengths}
    for arm, method in methods.items():
        fw.attach(model, method, arm)
        contexts[arm] = lambda batch, arm=arm: lambda: fw.rows(model, [arm])
    for row in range(max(options.batches)):
        fw.attach(model, fw.PrefixTuning(length=options.tenant_length, init="normal"), f"tenant {row}", seed=row)
    contexts[f"tenants l={options.tenant_length}"] = lambda batch: (
        lambda: fw.rows(model, [f"tenant {row}" for row in range(batch)])
    )
    fw.set_active(model, None)
    return contexts


class Decoder:
    """Greedy steps behind one prefill; every call decodes as many from the same point."""

    def __init__(
        self, model: PreTrainedModel, context: Callable[[], Any], batch: int, options: argparse.Namespace
    ) -> None:
        self.model, self.context, self.steps = model, context, options.steps
        ids = torch.randint(0, 49152, (batch, options.prompt), generator=torch.Generator().manual_seed(0))
        self.cache = DynamicCache(config=model.config)
        with self.context():
            self.token = self.step(ids)
        self.cache_bytes = cache_bytes(self.cache)

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def __call__(self) -> None:
        token = self.token
        with self.context():
            for _ in range(self.steps):
                token = self.step(token)
        with torch.inference_mode():
            self.cache.crop(-self.steps)


if __name__ == "__main__":
    main()
