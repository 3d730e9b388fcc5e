"""foreword join"""

from __future__ import annotations


def run(adapters: list[str], output: str = "out/joined", model: str | None = None, dtype: str = "auto") -> None:
    """Join adapters into one that has everything that each of them has, as two cartridges side by side.

    Example:
        foreword join out/rome out/greece --output out/both

    Args:
        adapters: adapter folders or Hub ids of one base.
        output: folder of the joined adapter.
        model: a Hub id, a local folder, or "smollm2"; the first adapter's own base by default.
        dtype: of the base while it is loaded: "auto", "float32", "bfloat16" or "float16".
    """
    from ..base import text_base
    from ..checkpoint import load, read_config, resolve_folder
    from ..join import join

    folders = [resolve_folder(one) for one in adapters]
    network, _ = text_base(model or read_config(folders[0])["base"]["model"], dtype=dtype)
    names = [load(network, folder, name=f"part{i}").name for i, folder in enumerate(folders)]
    print(join(network, names, "joined").save(output))
