"""Interleaved timing, ratios with their spread, and results as JSON and as Markdown tables."""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foreword import measuring
from foreword.files import write_text

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
CLOCKS = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}  # cpu: of all threads, steadier on a machine that others use


def interleave(
    arms: dict[str, Callable[[], Any]], repetitions: int, clock: str, warmup: int = 1
) -> dict[str, list[float]]:
    """`foreword.measuring.interleave` by one of `CLOCKS`."""
    return measuring.interleave(arms, repetitions, CLOCKS[clock], warmup)


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of an arm's time over the floor's in the same round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def ratio(seconds: Sequence[float], floor: Sequence[float]) -> Ratio:
    ratios = [a / b for a, b in zip(seconds, floor, strict=True)]
    if len(ratios) == 1:
        return Ratio(*ratios * 3)
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def keep_memory() -> None:
    """Let the allocator keep what is freed (Linux, glibc), as a GPU's does; page faults were a sixth of a step."""
    c = ctypes.CDLL(None)
    c.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    c.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    c.mallopt(M_TOP_PAD, 256 << 20)


def peak_memory(run: Callable[[], Any]) -> float:
    """MB that `run()` needs at its highest beyond what the process holds before it (Linux, glibc).

    From the first call on freed memory goes back to the system at once, which costs time: measure that before.
    """
    c = ctypes.CDLL(None)
    c.mallopt(M_MMAP_THRESHOLD, 65536)
    c.mallopt(M_TRIM_THRESHOLD, 0)
    c.mallopt(M_TOP_PAD, 0)
    gc.collect()
    c.malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    run()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


@dataclass
class Report:
    """Tables of one run, and where and how it was measured."""

    settings: dict[str, Any]
    tables: list[dict[str, Any]] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Keep a table and print it."""
        self.tables.append(
            {"title": title, "columns": list(columns), "rows": [[_plain(x) for x in row] for row in rows]}
        )
        print(markdown(self.tables[-1]), flush=True)

    def save(self, folder: Path, name: str) -> None:
        """Write `name`.json and `name`.md."""
        folder.mkdir(parents=True, exist_ok=True)
        machine = {
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        document = {"settings": self.settings, "machine": machine, "tables": self.tables}
        write_text(folder / f"{name}.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        facts = ", ".join(f"{key} {value}" for key, value in {**machine, **self.settings}.items())
        write_text(folder / f"{name}.md", "\n\n".join([facts, *map(markdown, self.tables)]) + "\n")


def markdown(table: dict[str, Any]) -> str:
    lines = [f"**{table['title']}**", "", "| " + " | ".join(table["columns"]) + " |"]
    lines.append("|" + "|".join(["---"] + ["---:"] * (len(table["columns"]) - 1)) + "|")
    lines += ["| " + " | ".join(_shown(value) for value in row) + " |" for row in table["rows"]]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    return {"median": value.median, "low": value.low, "high": value.high} if isinstance(value, Ratio) else value


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str(Ratio(**value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
