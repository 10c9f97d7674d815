"""Pages that stay open: they follow what happens, and say so when they no longer can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from chromium import expect, needs_chromium, open_page, until
from toy_runs import train_runs

import tinkex

pytestmark = needs_chromium
DATUM = tinkex.Datum(
    model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)
ANSWER = {"choices": [{"delta": {"content": "Hello."}}]}
EVENTS = f"data: {json.dumps(ANSWER)}\n\ndata: [DONE]\n\n"
LOST = "connection lost, trying again"
OVER = "no longer updated; load the page again"


@pytest.fixture(scope="module")
def world(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("open")
    with start_server(folder, "--engine", "toy") as base_url:
        [file] = folder.rglob("serving/*.json")
        token = json.loads(file.read_text())["owner_token"]
        yield SimpleNamespace(base_url=base_url, token=token, runs=train_runs(base_url, ("one",)))


@pytest.fixture
def page(world: SimpleNamespace) -> Iterator[Any]:
    with open_page(world.base_url) as page:
        page.goto(f"{world.base_url}/console/owner?token={world.token}")
        yield page


@pytest.fixture
def training(world: SimpleNamespace) -> Iterator[Any]:
    with tinkex.ServiceClient(base_url=world.base_url, display_name="grows") as service:
        training = service.create_lora_training_client("toy", rank=4).result()
        _step(training)
        yield training


def _step(training: Any) -> None:
    training.forward_backward([DATUM], "cross_entropy")
    training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()


def _show(page: Any, is_shown: bool) -> None:
    """What a browser does when the tab is put behind another one, or in front."""
    page.evaluate(
        "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: "
        "true }); document.dispatchEvent(new Event('visibilitychange')); }",
        not is_shown,
    )


def test_the_list_follows_its_runs_and_keeps_what_is_ticked(page, world, training):
    page.goto(f"{world.base_url}/console")
    row = page.locator("tbody tr", has=page.locator(f"[value='{training.model_id}']"))
    expect(row.locator("[data-label=Steps]")).to_have_text("1")
    row.locator("input[name=runs]").check()
    page.evaluate("document.querySelector('tbody').mark = 1")
    _step(training)
    expect(row.locator("[data-label=Steps]")).to_have_text("2")
    with tinkex.ServiceClient(base_url=world.base_url, display_name="came later") as service:
        service.create_lora_training_client("toy", rank=4).result()
    expect(page.locator("tbody tr").first).to_contain_text("came later")
    expect(page.locator("h1 .count")).to_have_text(str(page.locator("tbody tr").count()))
    assert row.locator("input[name=runs]").is_checked()
    assert page.locator("#num-chosen").text_content() == "1 selected"
    assert page.evaluate("document.querySelector('tbody').mark") == 1, "the page was not reloaded"


def test_a_tab_that_nobody_sees_holds_no_connection_and_catches_up(page, world, training):
    """Browsers have six connections to a host: with six such tabs, no seventh page would load."""
    page.goto(f"{world.base_url}/console/runs/{training.model_id}")
    count = "board.cards.get('loss_per_token')?.chart?.series[0].steps.length ?? 0"
    until(page, f"({count}) === 1")
    _show(page, is_shown=False)
    assert page.evaluate("live.readyState === EventSource.CLOSED")
    _step(training)
    assert page.evaluate(count) == 1
    _show(page, is_shown=True)
    until(page, f"({count}) === 2")


def test_the_servers_page_says_when_the_server_is_gone(page, world):
    page.expected.append("Failed to load")
    page.goto(f"{world.base_url}/console/server")
    health = page.locator("#health")
    expect(health).to_contain_text("healthy")
    page.route("**/api/server**", lambda route: route.abort())
    expect(health).to_contain_text(LOST)
    page.unroute("**/api/server**")
    expect(health).to_contain_text("healthy up for")


def test_the_page_of_a_command_says_when_it_follows_no_longer(page, world):
    page.expected += ["Failed to load", "status of 404"]
    page.goto(f"{world.base_url}/console/start/sft?data=missing.jsonl")
    page.route("**/api/launches/**", lambda route: route.abort())
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/launches/*")
    expect(page.locator("main")).to_contain_text(LOST)
    page.unroute("**/api/launches/**")
    page.route("**/api/launches/**", lambda route: route.fulfill(status=404, json={}))
    expect(page.locator("main")).to_contain_text(OVER)


def test_an_answer_is_asked_for_once_and_not_after_a_new_conversation(page, world):
    asked: list[Any] = []
    page.expected.append("Failed to load")
    page.route("**/console/api/chat", lambda route: asked.append(route))
    page.goto(f"{world.base_url}/console/playground")
    for text in ("one", "two"):  # the second while the first is being answered
        page.locator("#text").fill(text)
        page.keyboard.press("Enter")
    until(page, "talks.left.length === 1")
    assert len(asked) == 1
    assert page.locator("#text").input_value() == "two"
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#send")).to_be_enabled()
    page.locator("#send").click()
    until(page, "talks.left.length === 1")
    asked[-1].fulfill(body=EVENTS, content_type="text/event-stream")
    expect(page.locator("#talk-left")).to_contain_text("Hello.")
    turns = page.evaluate("talks.left.map((turn) => turn.content)")
    assert turns == ["two", "Hello."]
    page.locator("#mode").select_option("completion")
    expect(page.locator("#system")).to_be_disabled()


def test_charts_follow_the_colours_of_the_system(page, world):
    page.goto(f"{world.base_url}/console/runs/{world.runs[0].run_id}")
    until(page, "Boolean(document.querySelector('.chart canvas'))")
    picture = "document.querySelector('.chart canvas').toDataURL()"
    page.evaluate(f"window.before = {picture}")
    page.emulate_media(color_scheme="dark")
    until(page, f"{picture} !== window.before")
