"""Two adapters in one transformers pipeline, in turn and in one batch."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import pipeline

import foreword as fw
import tiny


def main(argv: Sequence[str] | None = None) -> dict[str, str]:
    args = tiny.arguments(argv, "pipeline")
    model, tokenizer = tiny.base(args.model)
    for seed, name in enumerate(("support", "billing")):
        fw.attach(model, fw.PrefixTuning(length=8), name=name, seed=seed)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    answers = {}
    for name in ("support", "billing", None):
        fw.set_active(model, name)
        answers[str(name)] = generate("My order is late.", **settings)[0]["generated_text"]
    with fw.rows(model, ["support", "billing", None]):
        together = generate(["My order is late."] * 3, batch_size=3, **settings)
    assert [one[0]["generated_text"] for one in together] == list(answers.values())
    return answers


if __name__ == "__main__":
    for name, answer in main().items():
        print(f"{name}: {answer!r}")
