"""Headless Chromium: a page as a reader has it, and what its console says."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)


def visit(path: Path, page: str, script: str = "", *flags: str, allowed: bool = True) -> tuple[str, list[str]]:
    """Open `page` at `path`, run `script` in it, and return the document as it then stands and the console's lines.

    The page's policy refuses foreign scripts, so the script's hash is added to it unless `allowed` is false.
    """
    if allowed:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        page = page.replace("script-src ", f"script-src 'sha256-{digest}' ")
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += [f"--user-data-dir={path.parent / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, *flags, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HOME": str(path.parent)},
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def answer(dom: str) -> object:
    """What the script left as JSON in the document's data-answer."""
    found = re.search(r'<html[^>]* data-answer="([^"]*)"', dom)
    assert found, "the script left no answer"
    return json.loads(html.unescape(found[1]))


def ask(path: Path, page: str, expression: str, *flags: str) -> object:
    """The value of a JavaScript expression (or promise of one) in `page`; the console has to stay silent."""
    script = f"(async () => {{ document.documentElement.dataset.answer = JSON.stringify(await ({expression})); }})();"
    dom, console = visit(path, page, script, *flags)
    assert console == []
    return answer(dom)
