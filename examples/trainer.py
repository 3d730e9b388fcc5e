"""A prefix in transformers' plain `Trainer`. Nothing but the adapter is trained, and nothing but it is saved."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

import foreword as fw
import tiny


def main(argv: Sequence[str] | None = None) -> list[float]:
    args = tiny.arguments(argv, "trainer")
    model, tokenizer = tiny.base(args.model)
    adapter = fw.attach(model, fw.PrefixTuning(length=8), name="colours")
    words = ["red", "green", "blue", "black"]
    texts = [f"The {i}th colour is {words[i % 4]}." for i in range(64)]
    rows = [tokenizer(text) for text in texts]
    settings = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=adapter.methods[0].learning_rate,
        logging_steps=1,
        save_strategy="no",  # the trainer would save the whole model; the adapter is saved below
        report_to="none",
    )
    trainer = Trainer(model, settings, DataCollatorForLanguageModeling(tokenizer, mlm=False), train_dataset=rows)
    trainer.train()
    adapter.save(args.output)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
