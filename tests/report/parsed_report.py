"""Reads a report back: elements, text and the data of the downloads, with a parser that minds the nesting."""

import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A parsed report: `elements` as (tag, attributes), `text` outside of scripts and styles, `data` of the downloads.

    Raises AssertionError where an element is closed that isn't the open one.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.data: list[Any] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), f"<{tag}> has an attribute twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> closes itself in SVG only"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self.elements[-1][1].get("type") == "application/json":
                self.data.append(json.loads(data))
        elif self.open and self.open[-1] != "style":
            self.text += data

    def tags(self, tag: str, css: str = "") -> list[dict[str, str | None]]:
        """The attributes of each `tag` that has the class `css`."""
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and (not css or css in (attributes.get("class") or "").split())
        ]

    def numbers(self) -> list[float]:
        """Every coordinate of every drawing."""
        parts = [
            attributes.get(name) or ""
            for _, attributes in self.elements
            for name in ("d", "x", "y", "width", "height", "transform", "fill-opacity", "viewBox")
        ]
        words = re.findall(r"[a-zA-Z]{2,}|-?\d+\.?\d*(?:e-?\d+)?", " ".join(parts))
        return [float(word) for word in words if word not in ("translate", "rotate")]
