"""Debian's Chromium, driven by Playwright, for the tests of the console.

With TINKEX_SCREENSHOTS=1 the pictures of docs/console.md are made again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
AXE = find_spec("axe_playwright_python")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WAIT_MS = 200_000
"""How long a page may take on a busy machine; Playwright would give it 30 s."""
HOSTILE = "<img src=x onerror=window.hacked=1>"
# Only whole tests are left out: one that ended half-way would leave its state to the next.
needs_axe = pytest.mark.skipif(
    AXE is None, reason="no axe-core: pip install -c constraints.txt axe-playwright-python"
)
needs_chromium = [
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no chromium: `make test-browser SYSTEM=1` as root installs Debian's",
    ),
    pytest.mark.timeout(1200),
]
SCHEMES = ["light", "dark"] if os.environ.get("TINKEX_SCREENSHOTS") else ["light"]


@contextmanager
def open_page(base_url: str, scheme: str = "light") -> Iterator[Any]:
    """A page that, when it is closed, must have had no error and asked no other host."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=WAIT_MS)
        context = browser.new_context(
            color_scheme=scheme, viewport={"width": 1200, "height": 800}, accept_downloads=True
        )
        context.set_default_timeout(WAIT_MS)  # of clicks, selectors, navigation and all else
        page = context.new_page()
        errors: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        context.on("request", lambda sent: asked.append(sent.url))
        page.scheme = scheme
        page.expected = []  # parts of errors that a test causes on purpose
        yield page
        assert [one for one in errors if not any(part in one for part in page.expected)] == []
        assert asked
        ours = (base_url, f"blob:{base_url}")
        assert [url for url in asked if not url.startswith(ours)] == []
        browser.close()


def log_in(page: Any, base_url: str, key: str) -> None:
    page.goto(f"{base_url}/console")
    page.fill("#key", key)
    with page.expect_navigation():
        page.click("main button")
    page.wait_for_selector("tbody")


def until(page: Any, condition: str, timeout_s: float = WAIT_MS / 1000) -> None:
    """Ask again and again: the page's own policy forbids Playwright's way of waiting.

    While a page is on its way, what the condition names may not be there: that is "not yet".
    """
    from playwright.sync_api import Error

    last: object = False
    for _ in range(int(timeout_s / 0.2)):
        try:
            last = page.evaluate(condition)
        except Error as fault:
            last = fault
        if last is True:
            return
        page.wait_for_timeout(200)
    raise AssertionError(f"not within {timeout_s:g} s: {condition}: {last}")


def expect(locator: Any) -> Any:
    """Assertions that ask until they hold: what a click leads to comes a moment later."""
    from playwright.sync_api import expect

    expect.set_options(timeout=WAIT_MS)
    return expect(locator)


def agree(page: Any, verb: str) -> None:
    """Say yes in the dialog that is open."""
    with page.expect_navigation():
        page.locator(".asker[open]").get_by_role("button", name=verb).click()


def refuse(page: Any) -> None:
    page.locator(".asker[open]").get_by_role("button", name="Cancel").click()
    expect(page.locator(".asker")).to_be_hidden()


def picture(page: Any, name: str) -> None:
    if os.environ.get("TINKEX_SCREENSHOTS"):
        page.screenshot(path=FIGURES / f"console-{name}-{page.scheme}.png")


def check_access(page: Any) -> None:
    """No serious fault for people with a keyboard or a screen reader, by axe-core."""
    assert AXE is not None
    assert AXE.origin is not None
    page.evaluate(Path(AXE.origin).with_name("axe.min.js").read_text())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        told = page.evaluate("axe.run(document)")
        assert len(told["passes"]) > 10
        faults = [
            (one["id"], one["help"], [node["target"] for node in one["nodes"]][:3])
            for one in told["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert faults == [], (page.url, scheme, faults)
    page.emulate_media(color_scheme=page.scheme)
