"""Rewards in TRL's `GRPOTrainer`: the adapted model generates, and answers with many vowels are rewarded."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import foreword as fw
import tiny


def vowels(completions: list[str], **kwargs) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def main(argv: Sequence[str] | None = None) -> list[float]:
    args = tiny.arguments(argv, "grpo")
    model, tokenizer = tiny.base(args.model)
    adapter = fw.attach(model, fw.PrefixTuning(length=8), name="vowels")
    settings = GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=adapter.methods[0].learning_rate,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        report_to="none",
    )
    data = Dataset.from_list([{"prompt": f"Say {i}:"} for i in range(64)])
    trainer = GRPOTrainer(model, vowels, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    adapter.save(args.output)
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


if __name__ == "__main__":
    rewards = main()
    print(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
