"""The page at /, in a headless browser: two adapters answer side by side, and the resident ones are marked."""

import json
import shutil

import httpx
import pytest
from harness import BASE, running

from foreword.serve.keys import VARIABLE, read_keys

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.wrong.append(message.text))
    yield page
    page.close()


def ask(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#send:not([disabled])")


def answers(page):
    return [page.locator(f"section[data-side='{side}'] .assistant").all_inner_texts() for side in (0, 1)]


def expected(server, name, messages):
    body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 8}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def choose(page, left, right):
    page.wait_for_selector("section option", state="attached")
    page.select_option("[data-side='0'] select", left)
    page.select_option("[data-side='1'] select", right)
    page.fill("#tokens", "8")


def test_two_adapters_answer_side_by_side_and_remember(server, page):
    page.goto(server.url)
    choose(page, "a0", "a1")
    ask(page, "Hello")
    first = answers(page)
    for side, name in enumerate(("a0", "a1")):
        said = page.locator(f"section[data-side='{side}'] .assistant").first.text_content()
        assert said == expected(server, name, [{"role": "user", "content": "Hello"}])
    assert first[0] != first[1]
    ask(page, "And then?")
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": page.locator("[data-side='1'] .assistant").first.text_content()},
        {"role": "user", "content": "And then?"},
    ]
    assert page.locator("[data-side='1'] .assistant").last.text_content() == expected(server, "a1", messages)
    assert "tokens in" in page.locator("[data-side='0'] .speed").text_content()
    page.click("#forget")
    assert answers(page) == [[], []]
    assert not page.wrong


def test_the_resident_adapters_are_marked(server, page):
    httpx.post(f"{server.url}/v1/completions", json={"model": "a2", "prompt": "x", "max_tokens": 1})
    page.goto(server.url)
    page.wait_for_selector("#adapters li.resident >> text=a2")
    listed = httpx.get(f"{server.url}/v1/adapters").json()["data"]
    assert page.locator("#adapters li").all_text_contents() == [one["id"] for one in listed]
    marked = page.locator("#adapters li.resident").all_text_contents()
    assert marked == [one["id"] for one in listed if one["resident"]]


def test_an_answer_can_be_stopped(server, page):
    page.goto(server.url)
    choose(page, "a0", BASE)
    page.fill("#tokens", "170")
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#stop:not([disabled])")
    page.click("#stop")
    page.wait_for_selector("#send:not([disabled])")
    for _ in range(200):
        if not server.engine.running:
            break
        page.wait_for_timeout(20)
    assert not server.engine.running


def test_mistakes_are_shown_and_text_is_not_markup(server, page):
    page.goto(server.url)
    choose(page, "a0", "a1")
    page.fill("#tokens", "100000")
    ask(page, "<img src=x onerror=alert(1)>")
    assert page.locator("section img").count() == 0
    assert "fit" in page.locator("[data-side='0'] .wrong").text_content()


def test_a_key_opens_the_page(folder, page, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps([{"key": "secret", "adapters": ["a1"]}]))
    with running(folder, keys=read_keys()) as server:
        page.goto(server.url)
        page.wait_for_selector("#adapters >> text=needs an API key")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#adapters li >> text=a1")
        assert page.locator("[data-side='0'] option").all_text_contents() == [BASE, "a1"]
