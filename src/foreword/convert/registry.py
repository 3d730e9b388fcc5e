"""The formats that adapters come from and go to.

A format is a module of this package with `matches(source)`, `read(source, layout, **options)`, or `write(adapter,
folder)`; and an entry here, whose rows are the table of docs/interop.md and what the tests have to cover.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import ForewordError
from ..model.adapter import Adapter
from ..model.host import host_of
from . import adapterhub, cartridges, he_unified, kv_cache, litgpt, llama_adapter, merged, p_tuning_v2, parscale, peft
from .source import Converted, Source


@dataclass(frozen=True)
class Row:
    """One kind of adapter in a format.

    Attributes:
        kind: as the other library calls it.
        becomes: the method here.
        positions: "after" where the other library's text positions count on after the prefix, "own" where the text
            has its own, "–" where positions don't matter.
        direction: "←" is read, "→" is written, "↔" is both.
    """

    kind: str
    becomes: str
    positions: str
    direction: str = "←"


@dataclass(frozen=True)
class Format:
    """A format of adapters.

    Attributes:
        name: on the command line.
        title: for people.
        rows: the kinds of adapters that it can hold.
        matches: whether a folder or file is of this format; None where that can't be seen.
        read: what a source is on a model of this layout, with the format's options.
        attach: in the place of `read`, where a format brings its own way of placing an adapter.
        write: write an adapter to a folder and return notes; None where it can't be written.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    matches: Callable[[Source], bool] | None = None
    read: Callable[..., Converted] | None = None
    attach: Callable[[PreTrainedModel, Source, str], Adapter] | None = None
    write: Callable[[Adapter, Path], list[str]] | None = None

    @property
    def options(self) -> list[str]:
        """Names of what `read` takes besides the source and the model's layout."""
        return [] if self.read is None else list(inspect.signature(self.read).parameters)[2:]


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format(
            "peft",
            "PEFT",
            (
                Row("PREFIX_TUNING, with or without projection", "prefix-tuning", "after", "↔"),
                Row("CARTRIDGE", "prefix-tuning with frozen tokens", "after", "↔"),
                Row("PROMPT_TUNING", "prompt-tuning", "after", "↔"),
                Row("P_TUNING", "prompt-tuning", "after"),
                Row("MULTITASK_PROMPT_TUNING", "prompt-tuning, one task", "after"),
                Row("ADAPTION_PROMPT", "zero-init", "own", "↔"),
                Row("LORA, IA3, VERA", "lora, ia3, vera", "–", "→"),
            ),
            peft.matches,
            peft.read,
            write=peft.write,
        ),
        Format(
            "adapterhub",
            "AdapterHub `adapters`",
            (
                Row("PrefixTuningConfig, flat or through its MLP", "prefix-tuning", "own"),
                Row("SeqBnConfig, DoubleSeqBnConfig", "adapter", "–"),
                Row("ParBnConfig", "parallel-adapter", "–"),
                Row("MAMConfig, other unions", "prefix-tuning + parallel-adapter", "own"),
                Row("UniPELTConfig, on BERT and RoBERTa", "unipelt", "own"),
            ),
            adapterhub.matches,
            adapterhub.read,
        ),
        Format(
            "he-unified",
            "He et al., unified view",
            (
                Row("prefix, prefix_nomlp (concat)", "prefix-tuning", "own"),
                Row("attention adapter, parallel or sequential", "parallel-adapter, adapter", "–"),
                Row("FFN adapter, parallel, sequential or pfeiffer", "parallel-adapter, adapter", "–"),
                Row("MAM (prefix and parallel FFN adapter)", "prefix-tuning + parallel-adapter", "own"),
            ),
            he_unified.matches,
            he_unified.read,
        ),
        Format(
            "p-tuning-v2",
            "P-tuning v2",
            (Row("prefix encoder, with or without projection", "prefix-tuning", "after"),),
            p_tuning_v2.matches,
            p_tuning_v2.read,
        ),
        Format(
            "llama-adapter",
            "LLaMA-Adapter (v1, and the non-linear fork)",
            (
                Row("linear prompts, tanh or raw gate", "zero-init", "own"),
                Row("linear prompts without a gate", "random-init", "own"),
                Row("hypermodel", "zero-init-nonlinear", "own"),
                Row("deepshare", "zero-init-nonlinear", "own"),
            ),
            llama_adapter.matches,
            llama_adapter.read,
        ),
        Format(
            "litgpt",
            "LitGPT",
            (
                Row("adapter", "zero-init", "own"),
                Row("adapter_v2", "llama-adapter-v2 + zero-init", "own"),
            ),
            litgpt.matches,
            litgpt.read,
        ),
        Format(
            "cartridges",
            "Cartridges",
            (Row("TrainableCache", "prefix-tuning", "after"),),
            cartridges.matches,
            cartridges.read,
        ),
        Format(
            "parscale",
            "ParScale",
            (Row("prefixes and aggregator", "parscale", "own", "↔"),),
            parscale.matches,
            attach=lambda model, source, name: parscale.load_parscale(model, source.path, name),
            write=parscale.write,
        ),
        Format(
            "kv-cache",
            "a plain KV cache, in safetensors",
            (Row("keys and values of every layer", "cartridge", "after", "↔"),),
            kv_cache.matches,
            kv_cache.read,
            write=kv_cache.write,
        ),
        Format(
            "merged",
            "a transformers checkpoint without an adapter",
            (Row("weights", "lora, ia3, vera, bitfit, full", "–", "→"),),
            write=merged.write,
        ),
    )
}


def detect(source: Source) -> Format:
    """The format of a source. Raises `ForewordError` where it is none of those that can be seen."""
    for one in FORMATS.values():
        if one.matches is not None and one.matches(source):
            return one
    known = ", ".join(name for name, one in FORMATS.items() if one.matches is not None)
    raise ForewordError(f"can't tell which library wrote {source.path}: name its format, one of {known}")


def import_adapter(
    model: PreTrainedModel, path: str | Path, name: str = "default", *, format: str | None = None, **options: Any
) -> Adapter:
    """Attach an adapter of another library to a model under `name`, and make it active.

    The model then computes what the other library's own forward computes. Where something is not taken along, a
    warning says so.

    Args:
        model: the base that the adapter was trained on.
        path: a local folder or file.
        format: one of `FORMATS`; seen from the files by default.
        options: of the format: `task` (peft), `gate` and `activation` (llama-adapter).

    Raises:
        ForewordError: the files are missing, damaged, of an unknown format, or hold what no method here computes.
    """
    source = Source(path)
    chosen = detect(source) if format is None else _named(format)
    if chosen.read is None and chosen.attach is None:
        raise ForewordError(f"{chosen.name} is a format to write, not to read")
    unknown = sorted(options.keys() - set(chosen.options))
    if unknown:
        raise ForewordError(f"{chosen.name} has no option {unknown[0]!r}; it has {', '.join(chosen.options) or 'none'}")
    if chosen.attach is not None:
        return chosen.attach(model, source, name)
    assert chosen.read is not None
    host = host_of(model)
    try:
        converted = chosen.read(source, host.layout, **options)
    except Exception as error:
        host.leave_if_empty()
        if isinstance(
            error, (KeyError, TypeError, AttributeError, IndexError)
        ):  # of a configuration that lacks a field
            raise ForewordError(f"{source.path} is no {chosen.name} adapter: {type(error).__name__} {error}") from error
        raise
    for note in converted.notes:
        warnings.warn(f"{source.path}: {note}", stacklevel=2)
    return converted.attach(model, name, source.path)


def export_adapter(adapter: Adapter, folder: str | Path, format: str) -> Path:
    """Write an adapter for another library. Returns the folder.

    Where the format can't express something, a warning says so. Raises `ForewordError` where it can't express the
    method, or the folder can't be written.
    """
    chosen, folder = _named(format), Path(folder)
    if chosen.write is None:
        raise ForewordError(f"{chosen.name} is a format to read, not to write")
    try:
        notes = chosen.write(adapter, folder)
    except OSError as error:
        raise ForewordError(f"can't write {folder}: {error.strerror or error}") from error
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return folder


def _named(name: str) -> Format:
    if name not in FORMATS:
        raise ForewordError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def table() -> str:
    """Every kind of adapter in every format, as the Markdown table of docs/interop.md."""
    lines = ["| library | its adapter | | here | text positions there |", "|---|---|---|---|---|"]
    for one in FORMATS.values():
        for index, row in enumerate(one.rows):
            library = f"{one.title} (`{one.name}`)" if index == 0 else ""
            lines.append(f"| {library} | {row.kind} | {row.direction} | {row.becomes} | {row.positions} |")
    return "\n".join(lines)
