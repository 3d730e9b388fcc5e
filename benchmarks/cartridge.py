"""How much of a document a cartridge holds, against its length.

    FOREWORD_DATA=data python -m benchmarks.cartridge --output out/cartridge

Compresses the first chapter of Alice in Wonderland for SmolLM2-135M to p = 32 … 512 tokens, and asks held-out questions
that the model itself wrote with pieces of the chapter in view, and questions about facts of the chapter that a person
wrote. The log-likelihood of the answers is measured with
nothing in the context, with the cartridge untrained (the first p tokens of the chapter) and trained, and with the
chapter. Answers also have a manner, whatever they are about, that any text and any training on a teacher's answers
shows: the second chapter in the context, and a cartridge of it that is trained alike, are the controls for how much of
the gap that closes. Self-study is shared by all lengths. Resumable.
"""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

import foreword as fw
from foreword.base import text_base
from foreword.cells import Cell, failures, run_cells
from foreword.compress import Compression, Dialogue, compress, init_ids, read_document
from foreword.demo import fast_dtype
from foreword.errors import ForewordError
from foreword.evaluate.document import Question, evaluate_document, read_questions, write_questions
from foreword.methods import Cartridge

from .measuring import Report

FACTS = Path(__file__).with_name("alice_chapter_1.jsonl")
NEW = 16  # tokens of a generated answer
CHAPTER = re.compile(r"^ +CHAPTER [IVXLC]+$", re.MULTILINE)


def train(book: dict[str, Any], length: int, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compress to one length, into `folder`. `book` holds the arguments of `text_of`."""
    model, tokenizer = text_base("smollm2", dtype=fast_dtype())
    compression = Compression(length=length, **settings)
    result = compress(model, tokenizer, text_of(**book), compression, folder / "cartridge")
    losses = [line["loss"] for line in result.history if "loss" in line]
    return {"folder": str(folder / "cartridge"), "seconds": round(result.seconds), "loss": [losses[0], losses[-1]]}


def evaluate(
    book: dict[str, Any], questions: int | str, settings: dict[str, Any], trained: dict[str, str], control: str
) -> dict[str, Any]:
    """Ask questions with every cartridge, trained and untrained; `trained` is p → folder."""
    model, tokenizer = text_base("smollm2", dtype=fast_dtype())
    dialogue = Dialogue(tokenizer)
    ids = dialogue.encode(text_of(**book))
    asked = asked_questions(model, tokenizer, ids, questions, settings)
    names = []
    for length, folder in trained.items():
        start = init_ids(model, dialogue, ids, Compression(length=int(length)))
        names.append(fw.attach(model, Cartridge(int(length)), name=f"untrained {length}", init_ids=start).name)
        names.append(fw.load(model, folder, name=f"trained {length}").name)
    names.append(fw.load(model, control, name="control").name)
    rows = evaluate_document(model, tokenizer, ids, asked, names, max_new_tokens=NEW)
    return {"rows": {row["context"]: row for row in rows}, "document": len(ids), "questions": len(asked)}


def evaluate_other(book: dict[str, Any], other: dict[str, Any], questions: int | str, settings: dict[str, Any]) -> Any:
    """The row of the same questions about `book` with another text in the context."""
    model, tokenizer = text_base("smollm2", dtype=fast_dtype())
    ids, others = (Dialogue(tokenizer).encode(text_of(**text)) for text in (book, other))
    asked = asked_questions(model, tokenizer, ids, questions, settings)
    return evaluate_document(model, tokenizer, others, asked, [], max_new_tokens=NEW)[-1]


def asked_questions(
    model: Any, tokenizer: Any, ids: list[int], questions: int | str, settings: dict[str, Any]
) -> list[Question]:
    """Those of a file, or so many that the model writes."""
    if isinstance(questions, str):
        return read_questions(questions, tokenizer)
    return write_questions(model, tokenizer, ids, Compression(**settings | {"conversations": questions}).study())


def text_of(path: str, chapters: int, skipped: int = 0) -> str:
    """Chapters of a book that have headings like CHAPTER IV, from the first that is not skipped."""
    text = read_document(path)
    borders = [*(found.start() for found in CHAPTER.finditer(text)), len(text)]
    if skipped + chapters >= len(borders):
        raise ForewordError(f"{path} has {len(borders) - 1} chapters; {skipped + chapters} are asked for")
    return text[borders[skipped] : borders[skipped + chapters]].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    alice = Path(os.environ.get("FOREWORD_DATA", "data")) / "alice" / "alice_in_wonderland.txt"
    parser.add_argument("--document", default=str(alice), help="a text with headings like CHAPTER IV")
    parser.add_argument("--chapters", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="*", default=[32, 64, 128, 256, 512])
    parser.add_argument("--control", type=int, default=128, help="length of the other chapter's cartridge")
    parser.add_argument("--conversations", type=int, default=160)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--facts", default=str(FACTS), help="a file of questions with answers; none for another text")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("out/cartridge"))
    options = parser.parse_args()
    settings = {
        "conversations": options.conversations,
        "shortest_chunk": 128,
        "longest_chunk": 256,
        "question_tokens": 32,
        "answer_tokens": 80,
        "temperature": 0.5,
        "batch_size": 32,
        "num_train_epochs": options.epochs,
        "learning_rate": options.learning_rate,
        "per_device_train_batch_size": 4,
        "save_steps": 16,
    }
    book = {"path": str(options.document), "chapters": options.chapters}
    cells = [
        Cell(f"p{length}", train, {"book": book, "length": length, "settings": settings}, folder=True)
        for length in options.lengths
    ]
    other = book | {"skipped": options.chapters}
    control = {"book": other, "length": options.control, "settings": settings}
    cells.append(Cell(f"control-p{options.control}", train, control, folder=True))
    run = partial(run_cells, output=options.output, workers=1, threads=options.threads)
    done = run(cells, description="compressing")
    if (problems := failures(done)) is not None:
        raise SystemExit(problems)
    *trained, control = done
    folders = {str(one.cell.arguments["length"]): one.result["folder"] for one in trained}
    report = Report({"chapters": options.chapters, "dtype": str(fast_dtype()).removeprefix("torch."), **settings})
    sets = [("questions", "written by the model", options.questions), ("facts", "about facts", options.facts)]
    for name, title, questions in sets if options.facts else sets[:1]:
        asking = {"book": book, "questions": questions, "settings": settings}
        done = run(
            [
                Cell(name, evaluate, asking | {"trained": folders, "control": control.result["folder"]}),
                Cell(f"{name}-other", evaluate_other, asking | {"other": other}),
            ],
            description="asking",
        )
        if (problems := failures(done)) is not None:
            raise SystemExit(problems)
        curve(report, title, *(one.result for one in done))
    training(report, {str(one.cell.arguments["length"]): one.result for one in trained} | {"control": control.result})
    report.save(options.output, "cartridge")


def curve(report: Report, title: str, result: dict[str, Any], other: dict[str, Any]) -> None:
    """A row for each length, the two ends that it runs between, and the two controls."""
    rows, total = result["rows"], result["document"]
    document = next(name for name in rows if name.startswith("document"))
    lines = [["nothing", "", *_numbers(rows["nothing"])]]
    for name, row in rows.items():
        if name.startswith("trained"):
            untrained = rows[f"un{name}"]["gap closed"]
            lines.append([f"p = {row['tokens']}", f"{total / row['tokens']:.1f}", *_numbers(row, untrained)])
    control = rows["control"]
    lines.append([f"p = {control['tokens']} of another chapter", "", *_numbers(control)])
    low, high = rows["nothing"]["loglik/token"], rows[document]["loglik/token"]
    closed = (other["loglik/token"] - low) / (high - low)
    other |= {"gap low": closed, "gap closed": closed, "gap high": closed}
    lines.append([f"another chapter, {other['tokens']:,} tokens", "", *_numbers(other)])
    lines.append([f"{document}, {rows[document]['tokens']:,} tokens", "1", *_numbers(rows[document])])
    numbers = ["log p a token", "gap closed (95 %)", "untrained", "F1", "first token, s", "tokens/s", "KV, MB"]
    report.table(f"{result['questions']} questions {title}", ["in context", "× fewer", *numbers], lines)


def _numbers(row: dict[str, Any], untrained: float | None = None) -> list[Any]:
    low, closed, high = row["gap low"], row["gap closed"], row["gap high"]
    closed = f"{closed:.0%} ({low:.0%} to {high:.0%})" if low != high else f"{closed:.0%}"
    before = "" if untrained is None else f"{untrained:.0%}"
    found = "" if row["f1"] is None else f"{row['f1']:.2f}"
    speed = [row["first token s"], row["tokens/s"], row["KV bytes"] / 1e6]
    return [f"{row['loglik/token']:.3f}", closed, before, found, *speed]


def training(report: Report, results: dict[str, dict[str, Any]]) -> None:
    """What it took."""
    lines = [[length, result["seconds"], *result["loss"]] for length, result in results.items()]
    report.table("Training", ["p", "seconds", "first loss", "last loss"], lines)


if __name__ == "__main__":
    main()
