"""A study of seconds: a tiny model, words to copy."""

from pathlib import Path

import yaml

import tiny

WORDS = ["red", "green", "blue"]


def write_study(folder: Path, **changes) -> Path:
    """A study file beside its model and data; `changes` replace its fields, and None drops one."""
    base = tiny.save(folder / "base")
    rows = [{"text": f"{n} {WORDS[n % 3]}", "label": WORDS[n % 3]} for n in range(60)]
    tiny.write_jsonl(folder / "words.jsonl", rows[:44])
    tiny.write_jsonl(folder / "test.jsonl", rows[44:])
    study = {
        "model": str(base),
        "tasks": {
            "words": {"train": "words.jsonl", "test": "test.jsonl", "train_size": 24, "test_size": 12, "dev_size": 6}
        },
        "methods": {
            "frozen": None,
            "zero": {"method": "zero-init", "length": 3, "layers": 3},
            "prefix": {"method": "prefix-tuning", "length": 4, "learning_rate": 0.02},
        },
        "seeds": 2,
        "train_for": [{"steps": 3}],
        "training": {"per_device_train_batch_size": 4, "logging_steps": 1},
    }
    study = {name: value for name, value in (study | changes).items() if value is not None}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path
