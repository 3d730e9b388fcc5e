"""foreword convert"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..convert import Source


def run(
    source: str,
    output: str | None = None,
    model: str | None = None,
    from_: str | None = None,
    to: str = "foreword",
    task: int | None = None,
    gate: str | None = None,
    activation: str | None = None,
    length: int | None = None,
    fused: str | None = None,
    dtype: str = "float32",
    json: bool = False,
) -> None:
    """Turn an adapter of another library into one of these, or one of these into another library's.

    Examples:
        foreword convert downloads/prefix --model smollm2 --output out/prefix
        foreword convert adapter.pth --from llama-adapter --length 10 --model folder/of/llama-7b --output out/alpaca
        foreword convert out/support --to peft --output out/support-peft

    The converted adapter computes what the other library's own forward computes; what is lost is printed. Formats to
    read: adapterhub, cartridges, he-unified, kv-cache, litgpt, llama-adapter, p-tuning-v2, parscale, peft. Formats to
    write: kv-cache, merged, parscale, peft.

    Args:
        source: a folder or file of another library, or an adapter folder of this one.
        output: the folder to write.
        model: the base, a Hub id, a local folder or "smollm2"; by default the one that the source names.
        from_: the format of the source; seen from its files by default.
        to: the format to write.
        task: peft: of a multitask prompt, the task whose prompt to take.
        gate: llama-adapter: "tanh" as in training (the default), "raw" as in the released inference code, or "none".
        activation: llama-adapter: of the fork's prompt network; "relu" by default.
        length: llama-adapter: prompt tokens of a layer; 10 by default.
        fused: litgpt: "split" (the default), or "grouped" for files of versions before 0.5.4.
        dtype: in which the base is loaded.
        json: print JSON.
    """
    import warnings

    from ..base import base
    from ..checkpoint import CONFIG, load, read_config
    from ..convert import Source, detect, export_adapter, import_adapter
    from ..errors import ForewordError
    from .output import console, show_json, show_table

    if output is None:
        raise ForewordError("convert needs --output, the folder to write")
    own = Source(source)
    ours = from_ == "foreword" or (from_ is None and "format" in own.config(CONFIG))
    library = "foreword" if ours else from_ or detect(own).name
    named = read_config(own.path)["base"]["model"] if ours else _base_of(own)
    if model is None and not named:
        raise ForewordError(f"{source} does not name its base: give --model")
    network, _ = base(str(model or named), dtype=dtype)
    given: dict[str, Any] = {"task": task, "gate": gate, "activation": activation, "length": length, "fused": fused}
    options = {name: value for name, value in given.items() if value is not None}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        adapter = load(network, own.path) if ours else import_adapter(network, own.path, format=library, **options)
        folder = adapter.save(output) if to == "foreword" else export_adapter(adapter, output, to)
    lost = [str(note.message) for note in notes if note.category is UserWarning]
    summary = {
        "source": str(own.path),
        "format": library,
        "methods": " + ".join(method.name for method in adapter.methods),
        "numbers": adapter.num_stored,
        "output": str(folder),
        "notes": lost,
    }
    if json:
        show_json(summary)
        return
    show_table([{"": key, "value": str(value)} for key, value in summary.items() if key != "notes"])
    for note in lost:
        console.print(f"Note: {note}", highlight=False)


def _base_of(source: Source) -> str | None:
    """The base that the configuration of an adapter names."""
    config = source.config("adapter_config.json")
    return config.get("base_model_name_or_path") or config.get("model_name")
