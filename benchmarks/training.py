"""What each economy of training on a frozen base is worth: a step with it, beside a step without.

    python -m benchmarks.training --output out/benchmarks

* logits: of every token, of the columns that some row learns, or of the learned tokens, some at a time (the default);
* `cache_frozen`: what enters the lowest adapted layer, computed anew or kept from an earlier epoch;
* `group_by_length`: the same examples in batches of random rows, or of rows of similar length;
* the base in bf16 instead of fp32, under an fp32 adapter.

Arms that belong together are interleaved in one process; ratios are to the first of them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import foreword as fw
from foreword import losses
from foreword.base import text_base
from foreword.data import to_text
from foreword.data.builtin import restaurants
from foreword.demo import fast_dtype
from foreword.frozen import FrozenLayers
from foreword.model.adapter import Adapter

from .measuring import Report, interleave, keep_memory, peak_memory, ratio

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch, Tensor], tuple[Tensor, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    dtype = fast_dtype()
    report = Report({"rows": options.rows, "clock": options.clock, "repetitions": options.repetitions})
    model, tokenizer = text_base("smollm2", dtype=dtype)
    examples = tokenized(tokenizer, 16 * options.rows)
    some = pad(examples[: options.rows])
    title = f"{options.rows} rows, {str(dtype).removeprefix('torch.')}"

    adapter = fw.attach(model, fw.PrefixTuning(length=10, init="normal"))
    long = torch.randint(3, 49152, (4, 512), generator=torch.Generator().manual_seed(0))
    whole = {"input_ids": long, "labels": long}  # every token is learned
    logits = {}
    for text, batch in (("restaurant listings", some), ("4 rows of 512 learned tokens", whole)):
        arms = logits[text] = {
            "of every token": lambda batch=batch: step(adapter, batch, of_every_token),
            "of learned columns": lambda batch=batch: step(adapter, batch, of_columns),
            "of learned tokens, by chunks": lambda batch=batch: step(adapter, batch, losses.completion_loss),
        }
        table(report, f"Logits, {text}, {title}", arms, options)

    for layers in (28, 15, 8):
        gated = fw.attach(model, fw.ZeroInit(length=10, layers=layers), f"top {layers}")
        frozen = FrozenLayers(gated, 1 << 30)
        arms = {
            "computed": lambda gated=gated: step(gated, some),
            "kept": lambda gated=gated, frozen=frozen: step(gated, some, context=frozen.remember),
        }
        table(report, f"Layers below the top {layers} of 30, {title}", arms, options)

    fw.set_active(model, adapter.name)
    by_length = sorted(examples, key=lambda example: len(example[0]))
    epochs = {
        "random": [pad(examples[i : i + options.rows]) for i in range(0, len(examples), options.rows)],
        "of similar length": [pad(by_length[i : i + options.rows]) for i in range(0, len(examples), options.rows)],
    }
    arms = {
        name: lambda batches=batches: [step(adapter, batch) for batch in batches] for name, batches in epochs.items()
    }
    table(report, f"An epoch of {len(examples)} examples in batches, {title}", arms, options, rounds=3)

    other = fw.attach(text_base("smollm2", dtype=torch.float32)[0], fw.PrefixTuning(length=10, init="normal"))
    arms = {"float32": lambda: step(other, some), str(dtype).removeprefix("torch."): lambda: step(adapter, some)}
    table(report, f"The base in, {options.rows} rows", arms, options)
    peaks = {text: {name: peak_memory(arm) for name, arm in arms.items()} for text, arms in logits.items()}
    report.table(
        f"Peak memory of logits, {title}, MB",
        ["logits", *peaks],
        [[name, *(own[name] for own in peaks.values())] for name in next(iter(peaks.values()))],
    )
    report.save(options.output, "training")


def table(
    report: Report,
    title: str,
    arms: dict[str, Callable[[], Any]],
    options: argparse.Namespace,
    rounds: int | None = None,
) -> None:
    seconds = interleave(arms, rounds or options.repetitions, options.clock)
    first = next(iter(seconds.values()))
    report.table(
        title,
        ["arm", "seconds", "time ratio (quartiles)"],
        [[name, sorted(s)[len(s) // 2], ratio(s, first)] for name, s in seconds.items()],
    )


def step(
    adapter: Adapter,
    batch: Batch,
    loss: Loss | None = None,
    context: Callable[[], Any] = contextlib.nullcontext,
) -> None:
    fw.set_active(adapter.model, adapter.name)
    items = (batch["labels"][:, 1:] != losses.IGNORED).sum()
    with context():
        (loss or losses.completion_loss)(adapter.model, batch, items)[0].backward()
    for parameter in adapter.trainable_parameters:
        parameter.grad = None


def of_every_token(model: nn.Module, batch: Batch, items: Tensor) -> tuple[Tensor, Any]:
    outputs = model(**batch, use_cache=False)
    return outputs.loss, outputs


def of_columns(model: nn.Module, batch: Batch, items: Tensor) -> tuple[Tensor, Any]:
    targets = nn.functional.pad(batch["labels"], (0, 1), value=losses.IGNORED)[:, 1:]
    rest = {name: value for name, value in batch.items() if name != "labels"}
    total, outputs = losses.by_columns(model, rest, targets)
    return total / items, outputs


def tokenized(tokenizer: PreTrainedTokenizerBase, count: int) -> list[tuple[list[int], int]]:
    """Token ids of an example, and how many of them are its prompt."""
    examples = []
    for row in restaurants("train", count):
        prompt, completion = to_text(row, tokenizer)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        examples.append((ids + tokenizer(completion, add_special_tokens=False)["input_ids"], len(ids)))
    return examples


def pad(examples: Sequence[tuple[list[int], int]]) -> Batch:
    """A batch with padding on the right; only completions are learned."""
    longest = max(len(ids) for ids, _ in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, losses.IGNORED)
    for row, (tokens, prompt) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, prompt : len(tokens)] = torch.tensor(tokens[prompt:])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    main()
