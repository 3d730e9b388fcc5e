"""foreword train"""

from __future__ import annotations

from ..train import Training


def run(
    data: str,
    settings: Training,
    method: str = "prefix-tuning",
    model: str = "smollm2",
    format: str | None = None,
    eval_data: str | None = None,
    eval_size: float = 0.1,
    dtype: str = "auto",
    json: bool = False,
) -> None:
    """Train an adapter on a frozen model. The loss is on completions only, and no parameter of the model changes.

    Examples:
        foreword train tickets.jsonl --output_dir out/support
        foreword train tickets.jsonl --output_dir out/support --method zero-init --method.length 10 --num_train_epochs 5
        foreword train tickets.jsonl --config run.yaml --resume_from_checkpoint

    Args:
        data: JSONL, JSON, CSV or Parquet with messages, prompt/completion, Alpaca, ShareGPT, choices, labels or text.
        model: a Hub id, a local folder, or "smollm2".
        format: the format of the data by name; detected by default.
        eval_data: a file of held-out examples.
        eval_size: without eval_data, the rows of `data` to hold out: a fraction, a number, or 0 for none.
        dtype: of the frozen model: "auto", "float32", "bfloat16", "float16". Adapters are always in float32.
        json: print the summary as JSON.
    """
    from ..base import text_base
    from ..data import load, split
    from ..train import train
    from .output import show_training

    examples = load(data, format)
    held_out = load(eval_data, format) if eval_data is not None else None
    if held_out is None and eval_size:
        examples, held_out = split(examples, eval_size if eval_size < 1 else int(eval_size), settings.seed)
    network, tokenizer = text_base(model, dtype=dtype)
    result = train(network, tokenizer, method, examples, settings, eval_data=held_out)
    show_training(result, json)
