"""A composition of two methods in TRL's `SFTTrainer`, on prompts and completions."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import foreword as fw
import tiny


def main(argv: Sequence[str] | None = None) -> list[float]:
    args = tiny.arguments(argv, "sft")
    model, tokenizer = tiny.base(args.model)
    adapter = fw.attach(model, [fw.PrefixTuning(length=8), fw.ParallelAdapter(bottleneck=16)], name="words")
    words = ["red", "green", "blue", "black"]
    rows = [{"prompt": f"{i} {words[i % 4]}:", "completion": f" {words[i % 4]}"} for i in range(64)]
    settings = SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=adapter.methods[0].learning_rate,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        report_to="none",
    )
    trainer = SFTTrainer(model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    adapter.save(args.output)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
