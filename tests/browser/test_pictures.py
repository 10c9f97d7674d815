"""The pictures of docs/console.md, from runs that are made here; TINKEX_SCREENSHOTS=1 writes them.

Without it the pages are opened all the same, at both widths and in both schemes, and none of them
may have an error or be wider than the screen.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from chromium import needs_chromium, open_page, picture, until
from patience import PATIENCE_S
from toy_runs import train_runs

pytestmark = needs_chromium
ROOT = Path(__file__).resolve().parents[2]
PHONE = {"width": 390, "height": 844}
NAMES = ("sums-grpo", "sums-grpo-lr-1e-3", "orders-sft", "orders-sft-rank-32", "persona")
SHOWN = set(re.findall(r"console-([\w-]+)\.png", (ROOT / "docs" / "console.md").read_text()))
"""The pictures that the page has."""
WORDS = ("The", " sum", " of", " seven", " and", " five", " is", " twelve", ".")


@pytest.fixture(scope="module")
def world(start_server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("pictures")
    # The page that starts a run shows the folder it would run in.
    with contextlib.chdir(folder), start_server(folder, "--engine", "toy") as base_url:
        [file] = folder.rglob("serving/*.json")
        token = json.loads(file.read_text())["owner_token"]
        runs = train_runs(base_url, NAMES)
        _describe(base_url, runs)
        yield SimpleNamespace(base_url=base_url, token=token, runs=runs, folder=folder)


def _describe(base_url: str, runs: list[SimpleNamespace]) -> None:
    with httpx.Client(base_url=base_url, timeout=PATIENCE_S) as client:
        for index, run in enumerate(runs):
            rate, is_rl = (2e-4, 1e-3)[index % 2], index < 2
            settings = {"learning_rate": rate, "schedule": "constant" if is_rl else "linear"}
            settings |= {"loss_fn": "importance_sampling", "group_size": 8} if is_rl else {}
            told: dict[str, Any] = {"name": run.name, "settings": settings}
            told["tags"] = ["rl", "sums"] if is_rl else ["sft"]
            if index == 1:
                told["note"] = "Five times the learning rate: faster, and the KL stays small."
            answer = client.put(f"/tinkex/v1/runs/{run.run_id}", json=told)
            assert answer.status_code == 200, answer.text


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, world: SimpleNamespace) -> Iterator[Any]:
    with open_page(world.base_url, request.param) as page:
        page.folder = str(world.folder)
        page.goto(f"{world.base_url}/console/owner?token={world.token}")
        yield page


RENAME = """([folder, name]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, name);
}"""


def _show(page: Any, address: str, name: str, ready: str = "true") -> None:
    page.goto(address)
    until(page, ready)
    page.wait_for_timeout(300)  # the last chart is drawn
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, address
    if f"{name}-{page.scheme}" in SHOWN:
        page.evaluate(RENAME, [page.folder, "/home/ann"])  # no folder of the tests' machine
        picture(page, name)


def test_every_page_fits_a_screen_and_a_telephone(page, world):
    console = f"{world.base_url}/console"
    run, ids = world.runs[1].run_id, ",".join(run.run_id for run in world.runs[:2])
    drawn = "document.querySelectorAll('.chart canvas').length > 0"
    for width, suffix in (({"width": 1200, "height": 780}, ""), (PHONE, "-phone")):
        page.set_viewport_size(width)
        _show(page, console, f"runs{suffix}")
        _show(page, f"{console}/runs/{run}", f"run{suffix}", drawn)
        _show(page, f"{console}/compare?runs={ids}", f"compare{suffix}", drawn)
        _show(page, f"{console}?view=settings", f"settings{suffix}")
        command = "document.getElementById('command').textContent.includes('sums.jsonl')"
        _show(page, f"{console}/start/sft?data=sums.jsonl&name=sums", f"start{suffix}", command)
        _show(page, f"{console}/server", f"server{suffix}")
        _show(page, f"{console}/playground", f"playground{suffix}")


def test_rollouts_of_a_folder_fit_a_screen(tmp_path):
    folder = tmp_path / "runs" / "sums"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    (folder / "rollouts.jsonl").write_text("".join(map(_answer, range(8))))
    command = [sys.executable, "-m", "tinkex.cli", "console", "--log-dir", str(tmp_path / "runs")]
    with subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        link = child.stdout.readline().strip()
        base_url = link.partition("/console")[0]
        with open_page(base_url) as other:
            other.folder = str(tmp_path)
            other.goto(link)
            run = other.locator("td.named a").get_attribute("href")
            _show(other, f"{base_url}{run}/rollouts", "rollouts")
            assert other.locator("article.said").count() == 8
        child.terminate()


def _answer(index: int) -> str:
    reward = (index % 4) / 3
    logprobs = [-0.05 - 0.4 * ((index + at) % 5) for at in range(len(WORDS))]
    one = {
        "step": 0,
        "group": index // 4,
        "prompt": f"What is 7 + {5 + index // 4}?",
        "text": "".join(WORDS),
        "tokens": list(range(len(WORDS))),
        "pieces": list(WORDS),
        "logprobs": logprobs,
        "reward": reward,
        "advantage": reward - 0.5,
    }
    return json.dumps(one) + "\n"
