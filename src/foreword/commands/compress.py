"""foreword compress"""

from __future__ import annotations

from ..compress.pipeline import Compression


def run(
    documents: list[str],
    settings: Compression,
    output: str = "out/cartridge",
    model: str = "smollm2",
    dtype: str = "auto",
    json: bool = False,
) -> None:
    """Compress documents into a cartridge: a prefix that answers as if they stood in the context.

    Examples:
        foreword compress manual.pdf --model smollm2 --length 256 --output out/manual
        foreword compress chapter1.md chapter2.md --length 512 --conversations 2048 --output out/book

    The frozen model writes questions and answers about pieces of the documents, and learns to give the same answers
    behind the prefix. Interrupted, the same command goes on where it stopped.

    Args:
        documents: files of text, Markdown, HTML or PDF, read one after the other.
        output: folder of the adapter.
        model: a Hub id, a local folder, or "smollm2".
        dtype: of the frozen model: "auto", "float32", "bfloat16", "float16". Cartridges are always in float32.
        json: print the summary as JSON.
    """
    from ..base import text_base
    from ..compress import compress, read_documents
    from ..devices import to_fastest
    from .output import show_training

    text = read_documents(documents)
    network, tokenizer = text_base(model, dtype=dtype)
    to_fastest(network)
    show_training(compress(network, tokenizer, text, settings, output), json)
