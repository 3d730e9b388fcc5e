"""Parallel streams on a frozen SmolLM2: held-out loss for P = 1, 2, 4 at one number of trained parameters; costs of P.

    FOREWORD_DATA=… python -m benchmarks.parscale

Trains on `alice/alice_in_wonderland.txt` of the folder FOREWORD_DATA, on the same batches for every P of a seed. The
budget of trained parameters is that of P = 4 with 48 prefix tokens a stream; P = 2 and P = 1 (a trained prefix alone)
get longer prefixes for it. Costs are CPU seconds of all threads, in rounds that run every arm once. Resumable: each
measurement is a cell.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import foreword as fw
from foreword.attention.fused import joint_attention
from foreword.base import text_base
from foreword.cells import Cell, failures, run_cells
from foreword.demo import fast_dtype
from foreword.errors import ForewordError
from foreword.files import write_json, write_text
from foreword.methods.parscale import width
from foreword.model.host import host_of

LENGTH = 48
STREAMS = (1, 2, 4)
SEEDS = (0, 1, 2)
TOKENS = 128  # of a row
HELD_OUT = 0.1  # of the text, its end
TEST_ROWS = 48


def method_for(model: PreTrainedModel, streams: int) -> fw.Method:
    """P streams with the prefix length that comes nearest to the budget."""
    layout = host_of(model).layout
    budget = fw.ParScale(max(STREAMS), LENGTH).count(layout).trainable
    token = fw.PrefixTuning(1).count(layout).trainable  # numbers of a prefix token
    if streams == 1:
        return fw.PrefixTuning(round(budget / token))
    d = width(layout)
    aggregator = streams * d * d + d + d * streams + streams
    return fw.ParScale(streams, round((budget - aggregator) / token / streams))


def text_rows(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Token rows (N, TOKENS) to train on, and of the end of the text."""
    folder = os.environ.get("FOREWORD_DATA")
    if folder is None:
        raise ForewordError("set FOREWORD_DATA to the folder that holds alice/alice_in_wonderland.txt")
    text = (Path(folder) / "alice" / "alice_in_wonderland.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    rows = ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)
    border = round(len(rows) * (1 - HELD_OUT))
    return rows[:border], rows[border:][:TEST_ROWS]


def loss_of(streams: int, seed: int, steps: int, batch: int, learning_rate: float) -> dict[str, Any]:
    """Train one arm; its held-out loss before and after, in nats a token."""
    model, tokenizer = text_base("smollm2", dtype=fast_dtype())
    train, test = text_rows(tokenizer)
    base = held_out_loss(model, test)
    adapter = fw.attach(model, method_for(model, streams), init_ids=train.flatten(), seed=seed)
    start = held_out_loss(model, test)
    optimizer = torch.optim.AdamW(adapter.trainable_parameters, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps, pct_start=0.1)
    order = torch.randint(len(train), (steps, batch), generator=torch.Generator().manual_seed(seed))
    model.train()
    begun = time.process_time()
    for rows in order:
        ids = train[rows]
        model(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.trainable_parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds = (time.process_time() - begun) / steps
    model.eval()
    return {
        "method": adapter.methods[0].to_dict(),
        "trained": adapter.num_trainable,
        "base": base,
        "start": start,
        "loss": held_out_loss(model, test),
        "cpu_seconds_a_step": seconds,
    }


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, rows: Tensor) -> float:
    losses = [model(ids, labels=ids, use_cache=False).loss.item() for ids in rows.split(8)]
    return statistics.mean(losses)


def step_cost(batch: int, rounds: int) -> dict[str, float]:
    """Median CPU seconds of a forward and backward: of P streams, and of P prefixes one after the other."""
    model, arms = _arms()
    ids = torch.arange(batch * TOKENS).view(batch, TOKENS) % model.config.vocab_size

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return _timed({name: partial(enter, step, times) for name, (enter, times) in arms.items()}, rounds)


def decode_cost(batch: int, prompt: int, new: int, rounds: int) -> dict[str, float]:
    """The same of decoding `new` tokens behind a prompt."""
    model, arms = _arms()
    ids = torch.arange(batch * prompt).view(batch, prompt) % model.config.vocab_size

    @torch.inference_mode()
    def generate() -> None:
        cache = DynamicCache(config=model.config)
        token = model(ids, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        for _ in range(new - 1):
            token = model(token, cache=cache).logits[:, -1].argmax(-1, keepdim=True)

    return _timed({name: partial(enter, generate, times) for name, (enter, times) in arms.items()}, rounds)


def padding_cost(batch: int, streams: int, prompt: int, rounds: int) -> dict[str, float]:
    """Median CPU seconds of one layer's attention in a prefill: with l more queries, as the authors have, and ours."""
    model, _ = text_base("smollm2", dtype=torch.float32)
    site = host_of(model).layout.sites[0]
    rows, dim = batch * streams, site.key_dim
    query = torch.randn(rows, site.num_heads, prompt, dim)
    key, value = torch.randn(2, rows, site.num_key_value_heads, prompt, dim)
    prefix_key, prefix_value = torch.randn(2, rows, site.num_key_value_heads, LENGTH, dim)
    seen = torch.ones(LENGTH + prompt, LENGTH + prompt, dtype=torch.bool).tril()

    @torch.no_grad()
    def padded() -> None:
        longer = torch.cat([query.new_zeros(rows, site.num_heads, LENGTH, dim), query], 2)
        keys, values = torch.cat([prefix_key, key], 2), torch.cat([prefix_value, value], 2)
        torch.nn.functional.scaled_dot_product_attention(longer, keys, values, attn_mask=seen, enable_gqa=True)

    @torch.no_grad()
    def ours() -> None:
        joint_attention(query, key, value, prefix_key, prefix_value, dim**-0.5, causal=True)

    return _timed({"padded": padded, "ours": ours}, rounds)


def _arms() -> tuple[PreTrainedModel, dict[str, tuple[Callable[[Callable[[], None], int], None], int]]]:
    """A model with P streams and with a prefix, and how to run something with each: name → (enter, times)."""
    model, _ = text_base("smollm2", dtype=torch.float32)
    sizes = [p for p in STREAMS if p > 1]
    fw.attach(model, fw.ParScale(sizes, LENGTH), name="streams")
    fw.attach(model, fw.PrefixTuning(LENGTH), name="prefix")

    def prefix(work: Callable[[], None], times: int) -> None:
        fw.set_active(model, "prefix")
        for _ in range(times):
            work()

    def streams(work: Callable[[], None], size: int) -> None:
        fw.set_active(model, "streams")
        fw.set_streams(model, size)
        work()

    arms: dict[str, tuple[Callable[[Callable[[], None], int], None], int]] = {"P = 1": (prefix, 1)}
    for size in sizes:
        arms[f"P = {size}"] = (streams, size)
        arms[f"{size} prefixes in turn"] = (prefix, size)
    return model, arms


def _timed(arms: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            begun = time.process_time()
            arm()
            if turn > 0:  # the first round warms up
                seconds[name].append(time.process_time() - begun)
    return {name: statistics.median(values) for name, values in seconds.items()}


def table(results: dict[str, Any]) -> str:
    """The Markdown tables of a run, of the cells that have a result."""
    lines = [
        "| P | prefix tokens a stream | trained | held-out loss: mean (each seed) | CPU s a step |",
        "|--:|--:|--:|:--|--:|",
    ]
    base = None
    for streams in STREAMS:
        runs = [results[name] for seed in SEEDS if (name := f"loss-p{streams}-seed{seed}") in results]
        if runs:
            base = runs[0]["base"]
            losses = [run["loss"] for run in runs]
            each = ", ".join(f"{loss:.3f}" for loss in losses)
            seconds = statistics.median(run["cpu_seconds_a_step"] for run in runs)
            row = (streams, runs[0]["method"]["length"], f"{runs[0]['trained']:,}")
            lines.append(f"| {' | '.join(map(str, row))} | {statistics.mean(losses):.3f} ({each}) | {seconds:.2f} |")
    text = "\n".join(lines) + ("" if base is None else f"\n\nThe frozen model alone: {base:.3f}.") + "\n"
    for name in [name for name in results if not name.startswith("loss-")]:
        first = next(iter(results[name].values()))
        text += f"\n| {name} | CPU s | ratio |\n|---|--:|--:|\n"
        text += "".join(f"| {arm} | {s:.4f} | {s / first:.2f} |\n" for arm, s in results[name].items())
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default="out/parscale", help="folder of the cells, results.json and table.md")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    train = {"steps": options.steps, "batch": options.batch, "learning_rate": options.learning_rate}
    rounds = options.rounds
    cells = [
        Cell("step-batch1", step_cost, {"batch": 1, "rounds": rounds}),
        Cell("decode-batch1", decode_cost, {"batch": 1, "prompt": 64, "new": 32, "rounds": rounds}),
        Cell("decode-batch8", decode_cost, {"batch": 8, "prompt": 64, "new": 16, "rounds": rounds}),
        Cell("attention-batch8-p4", padding_cost, {"batch": 8, "streams": 4, "prompt": 64, "rounds": 20 * rounds}),
    ] + [
        Cell(f"loss-p{p}-seed{seed}", loss_of, {"streams": p, "seed": seed, **train}, cost=float(p))
        for seed in SEEDS
        for p in STREAMS
    ]
    outcomes = run_cells(cells, options.output, workers=options.workers, threads=1, description="measuring")
    results = {one.cell.name: one.result for one in outcomes if one.error is None}
    write_json(Path(options.output) / "results.json", results)
    print(write_text(Path(options.output) / "table.md", table(results)).read_text())
    if (problems := failures(outcomes)) is not None:
        print(problems)


if __name__ == "__main__":
    main()
