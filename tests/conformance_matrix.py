"""Print the conformance matrix: architectures × methods, each cell right, refused or wrong.

    python tests/conformance_matrix.py [--output docs/conformance.md]

Exits with 1 where a cell is wrong.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track

import conformance
import foreword as fw
import zoo
from foreword.files import write_text

DOCUMENT = Path(__file__).parents[1] / "docs" / "conformance.md"
INTRODUCTION = """\
# Conformance

What each method does on each architecture, from tiny random models on transformers {version}. `make conformance`
writes this page; the test suite asserts every cell.

- ✓ n/n: all n checks that have a meaning there gave the right answer.
- refused: `attach` raises a clear error; the note says why.
- ✗: the checks that gave a wrong answer.
"""


@dataclass
class Cell:
    """How many checks one method passed on one architecture, which ones it failed, or why it was refused."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    refusal: str | None = None

    def mark(self, notes: list[str]) -> str:
        """The cell in Markdown; a refusal adds its reason to `notes`."""
        if self.refusal is not None:
            if self.refusal not in notes:
                notes.append(self.refusal)
            return f"refused [^{notes.index(self.refusal) + 1}]"
        return f"✗ {', '.join(self.wrong)}" if self.wrong else f"✓ {self.right}/{self.right}"


def cells_of(architecture: str, methods: list[str]) -> list[Cell]:
    """The row of an architecture."""
    return [cell_of(architecture, method) for method in methods]


def cell_of(architecture: str, method: str) -> Cell:
    cell = Cell()
    for name, check in conformance.CHECKS.items():
        try:
            case = conformance.fresh_case(architecture, method)
        except fw.ForewordError as error:
            return Cell(refusal=str(error))
        try:
            check(case)
            cell.right += 1
        except conformance.NotApplicable:
            pass
        except Exception:  # whatever it is, the cell is wrong
            cell.wrong.append(name)
    return cell


def document(matrix: dict[str, list[Cell]], methods: list[str]) -> str:
    """The page: the table, the reasons of refusals, and what the checks are."""
    notes: list[str] = []
    lines = [f"| architecture | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for architecture, cells in matrix.items():
        lines.append(f"| {architecture} | {' | '.join(cell.mark(notes) for cell in cells)} |")
    reasons = [f"[^{number}]: {note}" for number, note in enumerate(notes, 1)]
    checks = [f"- **{name}**: {inspect.getdoc(check)}" for name, check in conformance.CHECKS.items()]
    introduction = INTRODUCTION.format(version=transformers.__version__)
    return "\n".join([introduction, *lines, "", "## The checks", "", *checks, "", *reasons, ""])


def read_table(page: str) -> dict[str, dict[str, str]]:
    """architecture → method → mark, of a page that `document` wrote."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    (_, *methods), _, *body = rows
    return {architecture: dict(zip(methods, marks, strict=True)) for architecture, *marks in body}


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the conformance matrix as Markdown.")
    parser.add_argument("--output", type=Path, help="write the page to this file instead")
    output = parser.parse_args().output
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the models are tiny
    methods = sorted(fw.methods())
    console = Console(stderr=True)
    matrix = {
        architecture: cells_of(architecture, methods)
        for architecture in track(
            [*zoo.ZOO, *zoo.UNREACHABLE], "Checking", console=console, disable=not console.is_terminal
        )
    }
    page = document(matrix, methods)
    if output is None:
        print(page)
    else:
        write_text(output, page)
    return int(any(cell.wrong for cells in matrix.values() for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
