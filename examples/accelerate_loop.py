"""A training loop of your own with accelerate: on one process, or on several with

accelerate launch --num_processes 2 --cpu examples/accelerate_loop.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import foreword as fw
import tiny


def main(argv: Sequence[str] | None = None) -> list[float]:
    args = tiny.arguments(argv, "accelerate")
    accelerator = Accelerator(cpu=True)
    model, tokenizer = tiny.base(args.model)
    adapter = fw.attach(model, fw.PrefixTuning(length=8), name="count", seed=0)  # the same numbers on every process
    texts = [f"{i}, {i + 1}, {i + 2}" for i in range(10, 74)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    rows = list(zip(batch["input_ids"], batch["attention_mask"], strict=True))
    optimizer = torch.optim.AdamW(adapter.trainable_parameters, lr=adapter.methods[0].learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8))
    losses: list[float] = []
    while len(losses) < args.steps:
        for ids, mask in loader:
            loss = model(input_ids=ids, attention_mask=mask, labels=ids.where(mask.bool(), -100)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == args.steps:
                break
    if accelerator.is_main_process:
        adapter.save(args.output)
    return losses


if __name__ == "__main__":
    history = main()
    if Accelerator(cpu=True).is_main_process:
        print(f"loss {history[0]:.3f} → {history[-1]:.3f}")
