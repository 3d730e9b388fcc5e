"""foreword inspect"""

from __future__ import annotations


def run(adapter: str, json: bool = False) -> None:
    """Show what is in an adapter folder: methods, sizes, base, position convention, and every tensor.

    Example:
        foreword inspect out/support

    Args:
        adapter: an adapter folder or Hub id.
        json: print JSON.
    """
    from ..checkpoint import read, resolve_folder
    from .output import show_json, show_table

    folder = resolve_folder(adapter)
    config, tensors = read(folder)
    base = config["base"]
    summary = {
        "adapter": str(folder),
        "methods": [method.to_dict() for method in config["methods"]],
        "folded": config["folded"],
        "base": base["model"],
        "architecture": base["architecture"],
        "attention layers": len(base["attention"]),
        "positions": base["positions"],
        "numbers": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": (folder / config["weights"]).stat().st_size,
        "tensors": {
            name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in tensors.items()
        },
    }
    if json:
        show_json(summary)
        return
    rows = [(name, value) for name, value in summary.items() if name not in ("methods", "tensors")]
    for method in summary["methods"]:
        rows += [(name, value) for name, value in method.items()]
    show_table([{"": name, "value": "–" if value is None else str(value)} for name, value in rows])
    show_table(
        [{"tensor": name, "dtype": kind, "shape": str(shape)} for name, (kind, *shape) in summary["tensors"].items()]
    )
