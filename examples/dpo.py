"""Preferences in TRL's `DPOTrainer`. The reference is the base itself: a second copy without the adapter."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import foreword as fw
import tiny


def main(argv: Sequence[str] | None = None) -> list[float]:
    args = tiny.arguments(argv, "dpo")
    model, tokenizer = tiny.base(args.model)
    reference, _ = tiny.base(args.model)
    adapter = fw.attach(model, fw.ZeroInit(length=8), name="polite")  # starts from the reference, bit for bit
    rows = [{"prompt": f"Ticket {i}:", "chosen": " Thank you.", "rejected": " No."} for i in range(64)]
    settings = DPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=adapter.methods[0].learning_rate,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        report_to="none",
    )
    data = Dataset.from_list(rows)
    trainer = DPOTrainer(model, ref_model=reference, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    adapter.save(args.output)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
