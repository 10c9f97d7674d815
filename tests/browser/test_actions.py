"""Starting, stopping, resuming and exporting from the browser, by the owner of the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chromium import (
    SCHEMES,
    check_access,
    expect,
    needs_axe,
    needs_chromium,
    open_page,
    until,
)

pytestmark = needs_chromium
ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy!"}]}


@pytest.fixture(scope="module")
def world(
    start_server, default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("actions")
    data = folder / "greetings.jsonl"
    data.write_text(f"{json.dumps(ROW)}\n" * 40)
    with start_server(folder) as base_url:
        [file] = folder.rglob("serving/*.json")
        token = json.loads(file.read_text())["owner_token"]
        yield SimpleNamespace(base_url=base_url, folder=folder, data=data, token=token)


@pytest.fixture(params=SCHEMES)
def page(request: pytest.FixtureRequest, world: SimpleNamespace) -> Iterator[Any]:
    with open_page(world.base_url, request.param) as page:
        page.goto(f"{world.base_url}/console/owner?token={world.token}")
        yield page


def _status(page: Any) -> Any:
    return page.locator("#status")


def test_a_run_is_started_stopped_resumed_and_exported(page, world):
    page.get_by_role("link", name="Start a run").click()
    page.get_by_role("link", name="sft").click()
    name = f"greetings-{page.scheme}"
    page.get_by_role("textbox", name="Data required").fill(str(world.data))
    page.get_by_label("Name").fill(name)
    page.get_by_text("More settings").click()
    page.get_by_label("Log dir").fill(str(world.folder / name))
    page.get_by_label("Epochs").fill("20")
    page.get_by_label("Save every").fill("1")
    command = f"tinkex train sft {world.data} --name={name}"
    expect(page.locator("#command")).to_contain_text(command)
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/launches/*")
    metrics = world.folder / name / "metrics.jsonl"
    _until_steps(page, metrics, 2)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(_status(page)).to_have_text("stopped")
    done = len(metrics.read_text().splitlines())
    assert done < 100, "it was stopped"
    page.get_by_role("button", name="Run again").click()
    _until_steps(page, metrics, done + 1)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(_status(page)).to_have_text("stopped")
    page.get_by_role("link", name="Runs", exact=True).first.click()
    page.get_by_role("link", name=name).first.click()
    expect(page.locator("#resume-command")).to_have_text(
        f"tinkex train resume {world.folder / name}"
    )
    done = len(metrics.read_text().splitlines())
    page.get_by_role("button", name="Resume", exact=True).click()
    page.wait_for_url("**/launches/*")
    _until_steps(page, metrics, done + 1)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(_status(page)).to_have_text("stopped")
    page.get_by_role("link", name="Runs", exact=True).first.click()
    page.get_by_role("link", name=name).first.click()
    expect(page.locator(".facts")).to_contain_text("resumed 2 times, last ")
    page.get_by_role("link", name="Export").first.click()
    expect(page.get_by_label("Path")).to_have_value(re.compile("^tinker://"))
    page.get_by_label("Output").fill(str(world.folder / f"adapter-{page.scheme}"))
    page.get_by_role("button", name="Start", exact=True).click()
    expect(_status(page)).to_have_text("finished")
    assert (world.folder / f"adapter-{page.scheme}" / "adapter_config.json").is_file()


def _until_steps(page: Any, file: Path, count: int) -> None:
    for _ in range(1500):
        if file.is_file() and len(file.read_text().splitlines()) >= count:
            return
        assert _status(page).text_content() == "running", page.locator("#log").text_content()
        page.wait_for_timeout(200)
    raise AssertionError(page.locator("#log").text_content())


def test_a_form_that_lacks_something_says_so(page, world):
    page.goto(f"{world.base_url}/console/start/distill")
    until(page, "document.getElementById('command').textContent.includes('needed')")


@needs_axe
def test_everybody_can_use_the_forms(page, world):
    page.goto(f"{world.base_url}/console/start")
    check_access(page)
    page.goto(f"{world.base_url}/console/start/rl")
    page.get_by_text("More settings").click()
    check_access(page)
