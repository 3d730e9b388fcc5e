"""Adapters on the Hugging Face Hub: a model card made from the adapter's own files, and the upload.

`foreword.load(model, "user/name")` is the way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from .checkpoint import CONFIG, SUMMARY, read, read_config
from .errors import ForewordError
from .files import read_json, write_text

CARD, SCORES = "README.md", "scores.json"
UPLOADED = [CONFIG, "adapter-*.safetensors", SUMMARY, SCORES, CARD]


def push(folder: str | Path, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload an adapter folder to the Hub, with a model card where it has none. Returns the address of the commit.

    Weights of an earlier adapter in the repository are removed. Nothing else in the folder, such as checkpoints of its
    training, is uploaded.

    Args:
        folder: as `Adapter.save` or `foreword train` leaves it.
        repo: "user/name"; made where it does not exist.
        private: of a repository that is made.
        token: of the Hub; that of `hf auth login` by default.

    Raises:
        ForewordError: the folder holds no adapter, or the Hub refuses.
    """
    folder = Path(folder)
    weights = read_config(folder)["weights"]
    if not (folder / CARD).exists():
        write_card(folder, repo)
    api = huggingface_hub.HfApi(token=token)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[weights if "*" in pattern else pattern for pattern in UPLOADED],
            delete_patterns=["adapter-*.safetensors"],
            commit_message="Upload the adapter",
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ForewordError(f"can't push to {repo}: {str(error).strip().splitlines()[0]}") from error
    return str(getattr(commit, "commit_url", commit))


def write_card(folder: str | Path, repo: str | None = None) -> Path:
    """Write the model card of an adapter folder to its README.md, over what it held. Returns the file.

    It says what the adapter's files say: method, sizes, base, training data and losses, scores (`scores.json`, a flat
    object of names and numbers, where there is one), and how to use it.

    Args:
        repo: the Hub id that the snippet loads; the folder itself by default.
    """
    folder = Path(folder)
    return write_text(folder / CARD, card(folder, repo or str(folder)))


def card(folder: Path, repo: str) -> str:
    """The text of the model card."""
    config, tensors = read(folder)
    methods = config["methods"]
    names = [method.name for method in methods]
    base = config["base"]
    title = repo.rsplit("/", 1)[-1]
    size = (folder / config["weights"]).stat().st_size
    rows = {
        "method": " + ".join(names),
        "base": base["model"] or base["architecture"],
        "numbers": f"{sum(tensor.numel() for tensor in tensors.values()):,}",
        "file": f"{size / 1024:,.0f} KiB",
        "folded": "yes" if config["folded"] else "no",
    }
    metadata = huggingface_hub.ModelCardData(
        base_model=base["model"] if "/" in base["model"] else None,
        library_name="foreword",
        tags=["foreword", "prefix-tuning", *names],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {title}",
        f"An adapter for {rows['base']}, made with Foreword.",
        _table(rows),
        _settings(methods),
        *_training(folder),
        *_scores(folder),
        "## Use",
        "```python\nimport foreword as fw\n\n"
        f'model, tokenizer = fw.base("{base["model"]}")\n'
        f'fw.load(model, "{repo}")\n'
        'model.generate(**tokenizer("…", return_tensors="pt"))\n```',
        *_sources(methods),
    ]
    return "\n\n".join(parts) + "\n"


def _settings(methods: list[Any]) -> str:
    fields = [
        (method.name, name, value) for method in methods for name, value in method.to_dict().items() if name != "method"
    ]
    lines = ["| method | field | value |", "|---|---|---|", *(f"| {m} | `{f}` | `{v!r}` |" for m, f, v in fields)]
    return "## Settings\n\n" + "\n".join(lines)


def _training(folder: Path) -> list[str]:
    if not (folder / SUMMARY).is_file():
        return []
    summary = read_json(folder / SUMMARY)
    examples, history = summary.get("examples", {}), summary.get("history", [])
    last = {key: line[key] for line in history for key in ("loss", "eval_loss") if key in line}
    rows = {
        "examples": f"{examples.get('train', 0):,}",
        "held out": f"{examples.get('eval', 0):,}",
        "steps": f"{summary.get('steps', 0):,}",
        "learning rate": f"{summary.get('settings', {}).get('learning_rate', 0):g}",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in last.items()},
    }
    return ["## Training\n\n" + _table(rows)]


def _scores(folder: Path) -> list[str]:
    if not (folder / SCORES).is_file():
        return []
    scores = read_json(folder / SCORES)
    if not isinstance(scores, dict) or not all(isinstance(value, (int, float)) for value in scores.values()):
        raise ForewordError(f"{folder / SCORES} must hold an object of names and numbers")
    return ["## Scores\n\n" + _table({name: f"{value:.4g}" for name, value in scores.items()})]


def _sources(methods: list[Any]) -> list[str]:
    cited = [method.citation for method in methods if method.citation]
    return [f"## Source\n\n{'; '.join(cited)}."] if cited else []


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
