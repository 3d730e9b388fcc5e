"""What the commands print: rich tables on a terminal, JSON where it is asked for."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..train import TrainResult

console = Console()
if not console.is_terminal:
    console = Console(width=160)  # a file or a pipe has no width


def show_json(value: Any) -> None:
    print(json_module.dumps(value, indent=2, ensure_ascii=False))


def show_table(rows: Sequence[dict[str, Any]], title: str | None = None) -> None:
    """A table whose columns are the keys of the first row; numbers stand on the right with their thousands apart."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in rows[0]:
        numeric = any(isinstance(row[name], (int, float)) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def show_training(result: TrainResult, json: bool) -> None:
    losses = [line["loss"] for line in result.history if "loss" in line]
    evals = [line["eval_loss"] for line in result.history if "eval_loss" in line]
    summary = {
        "adapter": str(result.output_dir),
        "method": " + ".join(method.name for method in result.adapter.methods),
        "trainable": result.adapter.num_trainable,
        "stored": result.adapter.num_stored,
        "bytes": sum(file.stat().st_size for file in result.output_dir.glob("adapter*")),
        "seconds": round(result.seconds, 1),
        "loss": losses[-1] if losses else None,
        "eval_loss": evals[-1] if evals else None,
    }
    if json:
        show_json(summary)
        return
    show_table([{"": name, "value": _text(value)} for name, value in summary.items()])
    console.print(f"Talk to it with: foreword chat --adapter {result.output_dir}", highlight=False)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
