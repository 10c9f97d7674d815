"""The console in a real browser: Debian's Chromium, driven by Playwright.

With TINKEX_SCREENSHOTS=1 the pictures of docs/console.md are made again.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium (tests/browser/install_chromium.sh)"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def world(
    start_server, default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A real model, two finished runs of ann's, and a client that can train on."""
    import tinkex

    folder = tmp_path_factory.mktemp("browser")
    with start_server(folder, "--api-key", "tml-ann=ann") as base_url:
        service = tinkex.ServiceClient(
            base_url=base_url, api_key="tml-ann", display_name="fox <i>fast</i>"
        )
        made = SimpleNamespace(base_url=base_url, service=service, runs=[])
        for rank, rate in ((8, 3e-3), (16, 5e-4)):
            made.runs.append(_trained(service, rank, rate))
        yield made
        service.close()


def _trained(service: Any, rank: int, rate: float) -> Any:
    training = service.create_lora_training_client(
        base_model="tinkex/SmolLM2-135M-Instruct-Q4", rank=rank
    ).result()
    _train(training, rate, 4)
    training.save_weights_for_sampler("final").result()
    return training


def _train(training: Any, rate: float, num_steps: int) -> None:
    import tinkex

    tokens = list(range(100, 116))
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 15},
    )
    for _ in range(num_steps):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinkex.AdamParams(learning_rate=rate)).result()


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, world: SimpleNamespace) -> Iterator[Any]:
    """A logged-in page that has no error and asks no other host."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(
            color_scheme=request.param, viewport={"width": 1200, "height": 800}
        )
        page = context.new_page()
        errors: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("request", lambda sent: asked.append(sent.url))
        page.goto(f"{world.base_url}/console")
        page.fill("#key", "tml-ann")
        page.click("main button")
        page.wait_for_selector("tbody")
        page.scheme = request.param
        yield page
        assert errors == []
        assert [url for url in asked if not url.startswith(world.base_url)] == []
        browser.close()


def _until(page: Any, condition: str, timeout_s: float = 60.0) -> None:
    """Ask again and again: the page's own policy forbids Playwright's way of waiting."""
    for _ in range(int(timeout_s / 0.2)):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(200)
    raise AssertionError(f"not within {timeout_s:g} s: {condition}")


def _picture(page: Any, name: str) -> None:
    if os.environ.get("TINKEX_SCREENSHOTS"):
        page.screenshot(path=FIGURES / f"console-{name}-{page.scheme}.png")


def test_the_list_shows_both_runs(page, world):
    assert page.locator("tbody tr").count() >= 2
    assert page.locator("tbody a").first.text_content() == "fox <i>fast</i>"
    _picture(page, "runs")


def test_a_curve_grows_while_the_run_trains(page, world):
    run = world.runs[0]
    page.goto(f"{world.base_url}/console/runs/{run.model_id}")
    page.wait_for_selector(".chart")
    count = "charts.get('loss_per_token').series[0].steps.length"
    before = page.evaluate(count)
    worker = threading.Thread(target=_train, args=(run, 1e-3, 2))
    worker.start()
    _until(page, f"{count} >= {before + 2}")
    worker.join()
    _picture(page, "run")


def test_two_runs_are_compared(page, world):
    for box in page.locator("tbody input[type=checkbox]").all()[:2]:
        box.check()
    page.click("#compare")
    page.wait_for_selector(".chart")
    assert page.locator(".legend li").count() == 2
    assert "lora.rank" in page.content()
    _picture(page, "compare")


def test_a_chat_streams_beside_the_base_model(page, world):
    page.goto(f"{world.base_url}/console/playground")
    page.fill("#text", "What is the capital of France?")
    page.fill("#max", "12")
    page.fill("#temperature", "0")
    page.select_option("#right", index=2)
    page.click("#send")
    _until(page, "document.querySelectorAll('.meta').length === 2")
    assert "Paris" in page.locator("#talk-left .model").text_content()
    _picture(page, "playground")


def test_a_checkpoint_is_published_and_deleted(page, world):
    run = world.runs[1]
    run.save_state(f"gone-{page.scheme}").result()
    page.goto(f"{world.base_url}/console/runs/{run.model_id}")
    row = page.locator("tr", has_text=f"gone-{page.scheme}")
    row.get_by_role("button", name="Publish").click()
    page.wait_for_load_state()
    assert "every user" in page.locator("tr", has_text=f"gone-{page.scheme}").text_content()
    page.on("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Delete").click()
    page.wait_for_load_state()
    assert page.locator("tr", has_text=f"gone-{page.scheme}").count() == 0


def test_a_phone_can_read_it(page, world):
    page.set_viewport_size({"width": 390, "height": 800})
    for path in ("/console", f"/console/runs/{world.runs[0].model_id}", "/console/playground"):
        page.goto(f"{world.base_url}{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    _picture(page, "phone")
