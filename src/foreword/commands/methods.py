"""foreword methods"""

from __future__ import annotations

from typing import Any


def run(model: str | None = None, budget: int | None = None, json: bool = False) -> None:
    """List every method; with a model, its trainable and stored parameters there, by formula and by counting.

    Examples:
        foreword methods
        foreword methods --model smollm2
        foreword methods --model smollm2 --budget 300000

    Args:
        model: a Hub id, a local folder, or "smollm2".
        budget: choose each method's size to train about this many parameters.
        json: print JSON.
    """
    from ..errors import ForewordError
    from ..space import methods
    from .output import console, show_json, show_table

    if model is None:
        if budget is not None:
            raise ForewordError("a budget needs a model: give --model")
        rows = [
            {"method": name, "what it is": _first_line(kind), "paper": kind.citation}
            for name, kind in methods().items()
        ]
    else:
        rows = _counts(model, budget)
    if json:
        show_json(rows)
        return
    show_table([{name: value for name, value in row.items() if name != "note"} for row in rows if not row.get("note")])
    for row in rows:
        if row.get("note"):
            console.print(f"{row['method']}: {row['note']}", highlight=False)


def _counts(model: str, budget: int | None) -> list[dict[str, Any]]:
    """A row for each method on the model: its size field, and its parameters by formula and by counting."""
    from ..base import base
    from ..count import fit_budget, table
    from ..errors import ForewordError
    from ..space import Method, methods

    network, _ = base(model)
    chosen: list[Method] = []
    refused: dict[str, str] = {}
    for name, kind in methods().items():
        try:
            chosen.append(kind() if budget is None else fit_budget(name, network, budget))
        except ForewordError as refusal:
            refused[name] = str(refusal)
    rows = []
    for row in table(network, chosen):
        if None not in (row.counted, row.formula) and row.counted != row.formula:
            raise ForewordError(f"{row.method.name}: {row.counted} counted, {row.formula} by formula; please report it")
        size = row.method.size
        rows.append(
            {
                "method": row.method.name,
                "size": None if size is None else f"{size}={getattr(row.method, size)}",
                "trainable": None if row.counted is None else row.counted.trainable,
                "by formula": None if row.formula is None else row.formula.trainable,
                "stored": None if row.counted is None else row.counted.stored,
                "stored by formula": None if row.formula is None else row.formula.stored,
                "of the model": None if row.share is None else f"{row.share:.3%}",
                "note": row.refusal,
            }
        )
    empty = dict.fromkeys(("size", "trainable", "by formula", "stored", "stored by formula", "of the model"))
    return rows + [{"method": name, **empty, "note": reason} for name, reason in refused.items()]


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").split("\n")[0].rstrip(".")
