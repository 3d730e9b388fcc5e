"""foreword methods"""

from __future__ import annotations


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
    from ..space import methods
    from .output import show_json, show_table

    if model is None:
        rows = [
            {"method": name, "what it is": _first_line(kind), "paper": kind.citation}
            for name, kind in methods().items()
        ]
    else:
        from ..base import base
        from ..count import table

        rows = table(base(model)[0], budget)
    if json:
        show_json(rows)
    else:
        show_table(rows)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").split("\n")[0].rstrip(".")
