"""Every page that the console's routes declare: for everybody (axe), on a screen and a telephone.

A route that is added has to be named here, with an address to open, or as one that is no page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from chromium import AXE, check_access, expect, needs_chromium, open_page, until
from patience import PATIENCE_S
from toy_runs import train_runs

from tinkex.server.console import launch_pages, pages, playground, run_pages, server_page

pytestmark = needs_chromium
WIDTHS = (1280, 390)
NO_PAGES = {
    "/console/enter": "leads on",
    "/console/owner": "leads on",
    "/console/download": "a file",
    "/console/runs/{run_id}/metrics.{kind}": "a file",
    "/console/runs/{run_id}/trace": "a file",
}
CUT_TABLES = (
    "[...document.querySelectorAll('main .scroll')].filter((box) => "
    "box.offsetParent && box.scrollWidth > box.clientWidth).map((box) => box.textContent)"
)
"""Tables of which a part is out of sight."""
CUT_TEXTS = (
    "[...document.querySelectorAll('main pre')].filter((box) => "
    "box.offsetParent && box.scrollWidth > box.clientWidth).map((box) => box.textContent)"
)
VIEWS = {
    "/console": ("", "?view=settings", "?view=folders", "?q=no-such-run"),
    "/console/login": ("/login",),
    "/console/runs/{run_id}": ("/runs/{run}", "/runs/no-such-run"),
    "/console/runs/{run_id}/rollouts": ("/runs/{run}/rollouts",),
    "/console/compare": ("/compare", "/compare?runs={runs}", "/compare?runs={runs}&baseline={run}"),
    "/console/start": ("/start",),
    "/console/start/{name}": ("/start/rl", "/start/export"),
    "/console/launches/{launch_id}": ("/launches/{launch}",),
    "/console/playground": ("/playground",),
    "/console/server": ("/server",),
}
"""The addresses under /console at which each page is looked at."""


def declared() -> set[str]:
    """The addresses of all routes that a browser can open."""
    modules = (pages, run_pages, playground, launch_pages, server_page)
    routes: list[Any] = [route for module in modules for route in module.router.routes]
    paths = {route.path for route in routes if "GET" in route.methods}
    return {path for path in paths if "/api/" not in path}


def test_every_route_is_looked_at_or_no_page():
    assert declared() == VIEWS.keys() | NO_PAGES.keys()


@pytest.fixture(scope="module")
def world(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("views")
    with start_server(folder, "--engine", "toy") as base_url:
        [file] = folder.rglob("serving/*.json")
        token = json.loads(file.read_text())["owner_token"]
        runs = train_runs(base_url)
        told = {"name": "<b>bold</b>", "note": "A note. " * 300, "tags": ["one", "two"]}
        httpx.put(
            f"{base_url}/tinkex/v1/runs/{runs[0].run_id}", json=told, timeout=PATIENCE_S
        ).raise_for_status()
        yield SimpleNamespace(base_url=base_url, token=token, runs=runs)


@pytest.fixture
def page(world: SimpleNamespace) -> Iterator[Any]:
    with open_page(world.base_url) as page:
        page.expected.append("status of 404")  # the page of a run that is not there
        page.goto(f"{world.base_url}/console/owner?token={world.token}")
        yield page


def _launched(page: Any, base_url: str) -> str:
    """A command that was started, and fails."""
    page.goto(f"{base_url}/console/start/sft?data=missing.jsonl")
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/launches/*")
    expect(page.locator("#status")).to_have_text("failed")
    return str(page.url.rpartition("/")[2])


def _look(page: Any, address: str) -> None:
    page.goto(address)
    if page.locator("#charts").count():
        until(page, "document.querySelectorAll('.chart canvas').length > 0")
    for fold in page.locator("main details:not(.menu):not([open]) > summary").all():
        if fold.is_visible():
            fold.click()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (address, width)
        assert page.evaluate(CUT_TEXTS) == [], address
        if width == min(WIDTHS):
            assert page.evaluate(CUT_TABLES) == [], address
        if AXE is not None:
            check_access(page)


def test_every_view_of_a_server_is_for_everybody(page, world):
    ids = [run.run_id for run in world.runs]
    facts = {"run": ids[0], "runs": ",".join(ids), "launch": _launched(page, world.base_url)}
    for addresses in VIEWS.values():
        for address in addresses:
            _look(page, f"{world.base_url}/console{address.format(**facts)}")


def test_open_menus_and_questions_are_for_everybody(page, world):
    address = f"{world.base_url}/console/runs/{world.runs[0].run_id}"
    for opener in (".edit summary", "summary:text('Download')", ".tab-row button.danger"):
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            page.goto(address)
            page.locator(opener).click()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, opener
            if AXE is not None:
                check_access(page)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A console of two run folders: one with all that a recipe writes, one with metrics alone."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    for folder in (whole, bare):
        folder.mkdir(mode=0o755)
        lines = ({"step": step, "time": 5.0 + step, "reward": step / 9} for step in range(9))
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
    answer = {
        "step": 8,
        "group": 0,
        "prompt": "1+1 " * 500 + "w" * 600,
        "text": "2 " * 999,
        "reward": 1.0,
        "tokens": [2],
    }
    (whole / "rollouts.jsonl").write_text(f"{json.dumps(answer)}\n")
    (whole / "config.json").write_text(json.dumps({"model": "toy", "rank": 8}))
    saved = {"step": 8, "state_path": "tinker://r:train:0/weights/8", "sampler_path": "x"}
    (whole / "checkpoints.jsonl").write_text(f"{json.dumps(saved)}\n")
    command = [sys.executable, "-m", "tinkex.cli", "console", "--log-dir", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        link = child.stdout.readline().strip()
        metrics = [folder / "metrics.jsonl" for folder in (whole, bare)]
        yield SimpleNamespace(link=link, base_url=link.partition("/console")[0], metrics=metrics)
        child.terminate()


def test_folders_have_the_views_of_a_server(folders):
    with open_page(folders.base_url) as page:
        page.expected.append("status of 404")
        page.goto(folders.link)
        runs = [one.get_attribute("value") for one in page.locator("input[name=runs]").all()]
        assert len(runs) == 2
        facts = {"runs": ",".join(runs), "launch": _launched(page, folders.base_url)}
        ours = {path for path in VIEWS if path not in ("/console/playground", "/console/server")}
        for path in sorted(ours - {"/console/login"}):
            for run in runs if "{run_id}" in path else runs[:1]:
                for address in VIEWS[path]:
                    given = address.format(run=run, **facts)
                    _look(page, f"{folders.base_url}/console{given}")


def test_a_folder_is_used_as_a_run_of_a_server_is(folders):
    """Search, filters, tabs, rollouts, checkpoints, settings, downloads, compare: the same."""
    with open_page(folders.base_url) as page:
        page.goto(folders.link)
        for file in folders.metrics:
            file.touch()  # a run is called running for a minute after its last line
        page.select_option("select[name=status]", "running")
        page.wait_for_url("**status=running**")
        expect(page.locator("tbody tr")).to_have_count(2)
        page.fill("input[name=q]", "whole")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=whole**")
        page.get_by_role("link", name="whole").click()
        page.wait_for_selector(".chart canvas")
        expect(page.locator("#checkpoints tbody tr")).to_have_count(2)
        expect(page.locator("#checkpoints")).to_contain_text("weights and optimizer")
        expect(page.locator("#settings tbody tr")).to_have_count(2)
        page.locator("summary:text('Download')").click()
        with page.expect_download() as waiting:
            page.get_by_role("link", name="Metrics as JSONL").click()
        lines = Path(waiting.value.path()).read_text().splitlines()
        assert [json.loads(line)["reward"] for line in lines] == [step / 9 for step in range(9)]
        page.get_by_role("link", name="Rollouts").click()
        expect(page.locator("article.said")).to_contain_text("reward 1")
        page.get_by_role("link", name="Charts").click()
        page.get_by_role("link", name="Export").first.click()
        expect(page.get_by_label("Path")).to_have_value("tinker://r:train:0/weights/8")
