"""Documents as text: plain text, Markdown, HTML and PDF."""

from __future__ import annotations

import importlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..errors import ForewordError

BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
INVISIBLE = ("script", "style", "template", "noscript", "head", "svg")  # elements of HTML that are no text


def read_documents(paths: Sequence[str | Path]) -> str:
    """The texts of several documents, one after the other. Raises as `read_document`."""
    if not paths:
        raise ForewordError("give at least one document")
    return "\n\n".join(read_document(path) for path in paths)


def read_document(path: str | Path) -> str:
    """The text of a document: of Markdown as it is written, of HTML as Markdown, of a PDF page by page.

    Args:
        path: of a file; what it holds decides, its name where that says nothing.

    Raises:
        ForewordError: the file is missing, empty, binary, damaged, encrypted, or has pages and no text; or a library
            that it needs is not installed.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ForewordError(f"{path} does not exist") from error
    except OSError as error:
        raise ForewordError(f"can't read {path}: {error.strerror or error}") from error
    if not data.strip():
        raise ForewordError(f"{path} is empty")
    kind = path.suffix.lower()
    if data.startswith(b"%PDF-") or kind == ".pdf":
        return _pdf(path, data)
    text = _decoded(path, data)
    if kind in (".html", ".htm", ".xhtml") or text.lstrip()[:15].lower().startswith(("<!doctype html", "<html")):
        text = _html(path, text)
    if not text.strip():
        raise ForewordError(f"{path} holds no text")
    return text.replace("\r\n", "\n").strip()


def _decoded(path: Path, data: bytes) -> str:
    encoding = next((name for bom, name in BOMS.items() if data.startswith(bom)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ForewordError(
            f"{path} is neither UTF-8 text nor a PDF: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error
    if "\0" in text:
        raise ForewordError(f"{path} is a binary file; give text, Markdown, HTML or PDF")
    return text


def _html(path: Path, text: str) -> str:
    soup = _library("bs4", path).BeautifulSoup(text, "html.parser")
    for element in soup(INVISIBLE):
        element.decompose()
    converter = _library("markdownify", path).MarkdownConverter(heading_style="ATX", strip=["a", "img"])
    return converter.convert_soup(soup)


def _pdf(path: Path, data: bytes) -> str:
    pypdf = _library("pypdf", path)
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # of a damaged file it warns line by line
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        locked = reader.is_encrypted and not reader.decrypt("")
        pages = [] if locked else [page.extract_text() for page in reader.pages]
    except Exception as error:  # damaged files raise many kinds
        raise ForewordError(f"{path} can't be read as a PDF: {' '.join(str(error).split())}") from error
    if locked:
        raise ForewordError(f"{path} is encrypted; remove its password first")
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    if not text:
        raise ForewordError(f"{path} has {len(pages)} pages and no text, as scans have; run OCR over it first")
    return text


def _library(name: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ForewordError(f"reading {path} needs {name}: pip install 'foreword[compress]'") from error
