"""The main job: a frozen model learns the listings of a restaurant guide, and is asked for listings it has not seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .base import text_base
from .data.builtin import restaurants, score
from .files import write_json
from .generation import Sampling, answer
from .model.attach import set_active
from .report import Report
from .space import Method
from .train import Training, TrainResult, train

SAMPLES = 3


@dataclass(frozen=True)
class DemoResult:
    """Held-out scores of the frozen model and of the same model with the adapter, and how long each part took."""

    training: TrainResult
    before: dict[str, float]
    after: dict[str, float]
    samples: list[dict[str, str]]
    seconds: dict[str, float]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        adapter = self.training.adapter
        return {
            "adapter": str(self.training.output_dir),
            "methods": [method.to_dict() for method in adapter.methods],
            "trainable": adapter.num_trainable,
            "bytes": self.bytes,
            "before": self.before,
            "after": self.after,
            "seconds": self.seconds,
            "samples": self.samples,
        }


def demo(
    method: Method | str | Sequence[Method | str],
    settings: Training,
    *,
    model: str = "smollm2",
    examples: int = 400,
    tests: int = 50,
) -> DemoResult:
    """Train `method` on `examples` listings, score it on `tests` held-out ones, and leave an adapter and a report.

    Writes to `settings.output_dir`: the adapter, `training.json`, `demo.json` and `report.html`.
    """
    network, tokenizer = text_base(model, dtype=fast_dtype())
    held_out = restaurants("test", tests)
    prompts = list(held_out["prompt"])
    greedy = Sampling(max_new_tokens=64, batch_size=25)
    seconds: dict[str, float] = {}

    started = time.perf_counter()
    answers_before = answer(network, tokenizer, prompts, greedy, description="Asking the frozen model")
    seconds["generate before"] = time.perf_counter() - started

    result = train(network, tokenizer, method, restaurants("train", examples), settings, eval_data=held_out)
    seconds["train"] = result.seconds

    started = time.perf_counter()
    set_active(network, result.adapter.name)
    answers_after = answer(network, tokenizer, prompts, greedy, description="Asking with the adapter")
    seconds["generate after"] = time.perf_counter() - started

    samples = [
        {
            "restaurant": held_out[row]["record"],
            "frozen model": answers_before[row],
            "with the adapter": answers_after[row],
            "listing": held_out[row]["completion"][0]["content"],
        }
        for row in range(SAMPLES)
    ]
    demo_result = DemoResult(
        training=result,
        before=score(answers_before, held_out),
        after=score(answers_after, held_out),
        samples=samples,
        seconds={name: round(value, 1) for name, value in seconds.items()},
        bytes=sum(file.stat().st_size for file in result.output_dir.glob("adapter*")),
    )
    write_json(result.output_dir / "demo.json", demo_result.to_dict())
    write_report(demo_result, result.output_dir / "report.html", model)
    return demo_result


def fast_dtype() -> torch.dtype:
    """bfloat16 where the machine multiplies it faster (a GPU, a CPU with AMX), float32 elsewhere."""
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    amx = torch.cpu.get_capabilities().get("amx_bf16", False) if hasattr(torch.cpu, "get_capabilities") else False
    return torch.bfloat16 if amx else torch.float32


def write_report(result: DemoResult, path: Path, model: str) -> Path:
    """The page of a demo run: scores, loss curve, samples, sizes and times."""
    adapter, training = result.training.adapter, result.training
    report = Report("A frozen model learns a house style", f"{adapter.methods[0].name} on {model}")
    report.facts(
        {
            "listings exactly right": f"{result.before['exact_match']:.0%} → {result.after['exact_match']:.0%}",
            "facts in the house's words": f"{result.before['slot_accuracy']:.0%} → {result.after['slot_accuracy']:.0%}",
            "numbers trained": f"{adapter.num_trainable:,}",
            "adapter file": f"{result.bytes / 1000:,.0f} kB",
            "training": f"{training.seconds:,.0f} s",
        }
    )
    report.text(
        "The task is a restaurant guide's listings, made by a seeded grammar: the order of the facts, the house "
        "word for each "
        "value and the closing advice are what there is to learn. No restaurant of the test occurs in training, nor "
        "do some of "
        "its kitchens and landmarks. The model's own parameters did not change."
    )
    report.lines("Loss", loss_curves(training.history), x="step", y="nats a token")
    report.samples(f"{SAMPLES} held-out restaurants", list(result.samples[0]), result.samples)
    rows = [
        {"measure": name, "frozen model": result.before[name], "with the adapter": result.after[name]}
        for name in result.after
    ]
    report.table("Held-out scores", rows, formats={name: "{:.1%}" for name in ("frozen model", "with the adapter")})
    report.table("Time", [{"part": name, "seconds": value} for name, value in result.seconds.items()])
    return report.write(path)


def loss_curves(history: list[dict[str, float]]) -> dict[str, list[tuple[float, float]]]:
    """Training and held-out loss by step, out of the trainer's log lines."""
    named = {"training": "loss", "held out": "eval_loss"}
    curves = {
        name: [(line["step"], float(line[key])) for line in history if key in line] for name, key in named.items()
    }
    return {name: points for name, points in curves.items() if points}
