"""Documents as text, and each file that is none in one line."""

import io

import pytest

import foreword as fw
from foreword.compress import read_document, read_documents

pypdf = pytest.importorskip("pypdf")
pytest.importorskip("markdownify")


def pdf(*pages: str | None, password: str | None = None) -> bytes:
    """A PDF with a line of text on each page; None is a page without text, as a scan has."""
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = pypdf.PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(300, 300)
        if text is not None:
            fonts = DictionaryObject({NameObject("/F1"): font})
            page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
            stream = DecodedStreamObject()
            stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
            page[NameObject("/Contents")] = stream
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    target = io.BytesIO()
    writer.write(target)
    return target.getvalue()


def written(folder, name: str, data: bytes | str):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_text_and_markdown_stay_as_they_are(tmp_path):
    assert read_document(written(tmp_path, "a.txt", "One.\r\nTwo.\n")) == "One.\nTwo."
    assert read_document(written(tmp_path, "b.md", "# Title\n\n* a\n")) == "# Title\n\n* a"
    assert read_document(written(tmp_path, "c", "Grüße".encode("utf-16"))) == "Grüße"


def test_html_keeps_its_text_and_structure(tmp_path):
    page = (
        "<html><head><title>no</title><style>p {color: red}</style></head><body><h2>Rome</h2><p>Built   in <b>753</b>"
        "</p><script>alert(1)</script><ul><li>Tiber</li></ul><a href='x.html'>more</a></body></html>"
    )
    for name in ("a.html", "page"):  # seen from its beginning too
        text = read_document(written(tmp_path, name, page))
        assert "## Rome" in text
        assert "Built in **753**" in text
        assert "* Tiber" in text
        assert "more" in text
        assert not any(word in text for word in ("alert", "color", "x.html", "<"))


def test_pages_of_a_pdf_follow_each_other(tmp_path):
    text = read_document(written(tmp_path, "a.pdf", pdf("The first page.", None, "The last one.")))
    assert text == "The first page.\n\nThe last one."
    assert read_document(written(tmp_path, "renamed.txt", pdf("Inside."))) == "Inside."


def test_documents_follow_each_other(tmp_path):
    one, two = written(tmp_path, "a.txt", "One."), written(tmp_path, "b.txt", "Two.")
    assert read_documents([one, two]) == "One.\n\nTwo."


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.txt", "", "is empty"),
        ("blank.md", " \n\t", "is empty"),
        ("image.txt", b"\x89PNG\r\n\x1a\n\x00\x00", "neither UTF-8 text nor a PDF: byte 0 is 0x89"),
        ("program.bin", b"ELF\x00\x01\x02", "binary"),
        ("script.html", "<html><script>1</script></html>", "holds no text"),
        ("scan.pdf", pdf(None, None), "2 pages and no text"),
        ("locked.pdf", pdf("Secret.", password="key"), "encrypted"),
        ("cut.pdf", pdf("A page.")[:60], "can't be read as a PDF"),
        ("fake.pdf", "no PDF at all", "can't be read as a PDF"),
    ],
)
def test_a_file_without_text_is_one_line(name, data, message, tmp_path):
    path = written(tmp_path, name, data)
    with pytest.raises(fw.ForewordError, match=message) as raised:
        read_document(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(fw.ForewordError, match="does not exist"):
        read_document(tmp_path / "none.txt")
    with pytest.raises(fw.ForewordError, match="can't read"):
        read_document(tmp_path)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(fw.ForewordError, match=r"needs pypdf: pip install 'foreword\[compress\]'"):
        read_document(written(tmp_path, "a.pdf", pdf("Text.")))
