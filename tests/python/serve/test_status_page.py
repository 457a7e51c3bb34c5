"""The status page, in a real browser."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1100, "height": 760})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def points(page: Page, chart: str, line: str) -> str:
    return page.locator(f"#chart-{chart} path.{line}").get_attribute("d") or ""


def test_it_shows_what_runs(demo_server: Any, page: Page, tmp_path: Path) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "n": 4}
    threads = [
        threading.Thread(
            target=httpx.post, args=(f"{demo_server.url}/v1/completions",), kwargs={"json": body, "timeout": 60}
        )
        for _ in range(2)
    ]
    page.goto(demo_server.url)
    expect(page.locator("#model")).to_have_text("demo")
    for thread in threads:
        thread.start()
    expect(page.locator("#tile-running")).to_have_text("8 / 16", timeout=20_000)
    expect(page.locator("#tile-kv")).not_to_have_text("0.0 %")
    for thread in threads:
        thread.join()
    expect(page.locator("#tile-running")).to_have_text("0 / 16", timeout=10_000)
    for chart, line in (("tokens", "first"), ("latency", "first"), ("requests", "first"), ("cache", "first")):
        assert "L" in points(page, chart, line)
        heights = {point.rsplit(",", 1)[1] for point in points(page, chart, line)[1:].split("L")}
        assert len(heights) > 1 or chart == "latency"  # a line that is not flat
    expect(page.locator("#error")).to_have_text("")
    page.screenshot(path=str(tmp_path / "status.png"))
    page.screenshot(path="/tmp/status.png")


def test_it_asks_for_the_key(tiny_llama: Path, page: Page, serve: Any) -> None:
    with serve(tiny_llama, "--num-threads", "1", "--api-key", "sesame") as server:
        page.goto(server.url)
        expect(page.locator("#error")).to_contain_text("an API key is needed")
        page.fill("#key-value", "sesame")
        page.click("#key button")
        expect(page.locator("#tile-running")).to_have_text("0 / 64", timeout=10_000)
        expect(page.locator("#key")).to_be_hidden()


def test_it_says_when_the_server_is_gone(tiny_llama: Path, page: Page, serve: Any) -> None:
    with serve(tiny_llama, "--num-threads", "1") as server:
        page.goto(server.url)
        expect(page.locator("#tile-running")).to_have_text("0 / 64")
    expect(page.locator("#error")).to_contain_text("no news from the server", timeout=10_000)
