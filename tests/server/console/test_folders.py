"""Run folders of this disk in the same pages: ours and tinker-cookbook's, whatever is in them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from visits import HOSTILE

from tinkex.server.console import folder_runs
from tinkex.server.console.folder_pages import create_app
from tinkex.server.console.folder_runs import Folder
from tinkex.server.runs.curves import MAX_CURVES


def write(file: Path, *lines: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def ours(folder: Path, num_steps: int = 3) -> None:
    for step in range(num_steps):
        line = {"step": step, "time": 1000.0 + step, "loss": 3.0 - step, "num_tokens": 10}
        write(folder / "metrics.jsonl", line)
    (folder / "config.json").write_text(json.dumps({"model": "toy", "rank": 8}))
    write(folder / "checkpoints.jsonl", {"step": 3, "state_path": "tinker://r:train:0/weights/a"})


def answer(step: int, group: int, reward: float) -> dict:
    pieces = ["so ", "<b>", "it ", "is"]
    return {
        "step": step,
        "group": group,
        "prompt": HOSTILE,
        "text": "".join(pieces),
        "tokens": [1, 2, 3, 4],
        "pieces": pieces,
        "logprobs": [-0.01, -0.4, -1.0, -5.0],
        "reward": reward,
        "advantage": reward - 0.5,
        "snapshot": "step-0",
    }


@pytest.fixture
async def seen(tmp_path: Path):
    """The pages over a folder with two runs, and a client that holds the link's secret."""
    ours(tmp_path / "sft")
    cookbook = tmp_path / "deep" / "cookbook"
    for step in range(4):
        line = {"step": step, "env/all/reward/total": step / 4, "time/total": 2.0, "note": "x"}
        write(cookbook / "metrics.jsonl", line, {"step": step, "optim/lr": 1e-4})
    nested = {"model_name": "meta/x", "dataset": {"batch_size": 4, "name": HOSTILE}}
    (cookbook / "config.json").write_text(json.dumps(nested))
    rewards = [(0, 1.0), (0, 0.0), (1, 1.0)]
    write(tmp_path / "sft" / "rollouts.jsonl", *(answer(2, g, reward) for g, reward in rewards))
    transport = httpx.ASGITransport(create_app(tmp_path, "secret"))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:1", follow_redirects=True
    ) as client:
        await client.get("/console/enter", params={"token": "secret"})
        listed = (await client.get("/console/api/runs")).json()["runs"]
        ids = {run["name"]: run["run_id"] for run in listed}
        yield SimpleNamespace(client=client, ids=ids, root=tmp_path, listed=listed)


async def test_both_kinds_of_folders_are_listed(seen):
    assert set(seen.ids) == {"sft", "deep/cookbook"}
    sft = next(run for run in seen.listed if run["name"] == "sft")
    assert (sft["base_model"], sft["rank"], sft["last"], sft["tokens"]) == ("toy", 8, 1.0, 30)
    page = await seen.client.get("/console")
    assert "deep/cookbook" in page.text


async def test_a_cookbook_run_has_its_curves_and_settings(seen):
    run = (await seen.client.get(f"/console/api/runs/{seen.ids['deep/cookbook']}")).json()
    assert run["curves"]["env/all/reward/total"]["values"] == [0.0, 0.25, 0.5, 0.75]
    assert run["curves"]["optim/lr"]["steps"] == [0, 1, 2, 3]
    assert run["settings"]["dataset.batch_size"] == 4
    assert run["base_model"] == "meta/x"


async def test_a_file_that_grows_or_starts_over_is_read_on(seen):
    async def steps():
        run = (await seen.client.get(f"/console/api/runs/{seen.ids['sft']}")).json()
        return run["curves"]["loss"]["steps"]

    assert await steps() == [0, 1, 2]
    file = seen.root / "sft" / "metrics.jsonl"
    with file.open("a") as out:
        out.write('{"step": 3, "loss"')
    assert await steps() == [0, 1, 2]
    with file.open("a") as out:
        out.write(": 0.5}\n")
    assert await steps() == [0, 1, 2, 3]
    file.write_text('{"step": 0, "loss": 9.0}\n')
    assert await steps() == [0]


def test_a_curve_with_a_long_name_grows_beside_all_that_there_is_room_for(tmp_path: Path):
    line = {"x" * 150: 1.0, **{f"curve{index}": 1.0 for index in range(MAX_CURVES - 1)}}
    write(tmp_path / "metrics.jsonl", line, line)
    curves = Folder.at(tmp_path).look()
    assert {len(curve.values) for curve in curves.values()} == {2}


async def test_rollouts_stand_in_groups_with_their_rewards(seen):
    path = f"/console/runs/{seen.ids['sft']}/rollouts"
    page = (await seen.client.get(path)).text
    assert page.count('class="card said"') == 3
    assert page.count('class="group"') == 2
    for shade in ("l0", "l1", "l2", "l4"):
        assert f'<span class="{shade}"' in page
    assert "<rect" in page
    by_advantage = (await seen.client.get(path, params={"color": "advantage"})).text
    assert '<span class="up3"' in by_advantage
    assert '<span class="down3"' in by_advantage
    told = (await seen.client.get(f"/console/api/runs/{seen.ids['sft']}/rollouts")).json()
    assert (told["steps"], len(told["answers"])) == ([2], 3)


async def test_answers_of_a_step_are_read_up_to_so_many_bytes(seen, monkeypatch):
    monkeypatch.setattr(folder_runs, "MAX_ANSWERS", len(json.dumps(answer(2, 0, 1.0))) * 2 + 20)
    told = (await seen.client.get(f"/console/api/runs/{seen.ids['sft']}/rollouts")).json()
    assert len(told["answers"]) == 2


async def test_what_is_in_a_folder_stays_text(seen):
    for run_id in seen.ids.values():
        for path in (f"/console/runs/{run_id}", f"/console/runs/{run_id}/rollouts"):
            page = await seen.client.get(path)
            assert page.status_code == 200
            assert HOSTILE not in page.text
            assert "<b>it" not in page.text


async def test_broken_files_break_no_page(seen):
    folder = seen.root / "broken"
    folder.mkdir()
    odd = '{"step": 1e999, "loss": NaN}\nnull\n[1]\n{"loss": "x", "a": {"b": 1}}\n{"step": true}\n'
    odd += '{"tokens": 1.7e308}\n{"tokens": 1.7e308}\n'
    (folder / "metrics.jsonl").write_text(odd + "\x00\xff{{{\n" + '{"step": 2, "loss": 1}\n')
    (folder / "config.json").write_text("[" * 100_000)
    bad = {"step": 0, "pieces": 3, "logprobs": {"a": 1}, "reward": "high", "group": [1]}
    write(folder / "rollouts.jsonl", bad, {"step": "one"}, {"step": 0, "tokens": None})
    (folder / "checkpoints.jsonl").write_text('{"state_path": 3}\nnull\n')
    runs = create_app(seen.root, "s")
    transport = httpx.ASGITransport(runs)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
        client.cookies.set("tinkex_console_1", "s")
        listed = (await client.get("/console/api/runs")).json()["runs"]
        run_id = next(run["run_id"] for run in listed if run["name"] == "broken")
        for path in ("", f"/runs/{run_id}", f"/runs/{run_id}/rollouts"):
            assert (await client.get(f"/console{path}")).status_code == 200


async def test_without_the_link_nothing_is_seen(seen):
    stranger = httpx.AsyncClient(transport=seen.client._transport, base_url="http://127.0.0.1:1")
    run_id = seen.ids["sft"]
    for path in ("/console", f"/console/runs/{run_id}", f"/console/runs/{run_id}/rollouts"):
        assert (await stranger.get(path)).headers["location"] == "/console/login"
    for path in ("/console/api/runs", f"/console/api/runs/{run_id}/live"):
        assert (await stranger.get(path)).status_code == 401
    wrong = await stranger.get("/console/enter", params={"token": "guess"})
    assert "set-cookie" not in wrong.headers


async def test_a_run_is_named_by_what_was_found_and_nothing_else(seen):
    for run_id in ("..", "%2e%2e", "../../etc", "sft", "0" * 16):
        answer = await seen.client.get(f"/console/api/runs/{run_id}")
        assert answer.status_code == 404


async def test_folders_are_compared(seen):
    ids = list(seen.ids.values())
    page = await seen.client.get("/console/compare", params={"runs": ids, "baseline": ids[1]})
    assert page.text.index(f"/console/runs/{ids[1]}") < page.text.index(f"/console/runs/{ids[0]}")
    assert 'title="No baseline">baseline</a>' in page.text


async def test_runs_that_are_too_many_to_compare_are_counted(seen):
    for index in range(20):
        ours(seen.root / f"more{index}")
    fresh = create_app(seen.root, "s")
    transport = httpx.ASGITransport(fresh)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
        client.cookies.set("tinkex_console_1", "s")
        listed = (await client.get("/console/api/runs")).json()["runs"]
        ids = [run["run_id"] for run in listed]
        few = await client.get("/console/compare", params={"runs": ids[:12]})
        assert "left-out" not in few.text
        many = await client.get("/console/compare", params={"runs": ids})
        assert "the first 12 of the 22 chosen runs" in many.text
        all_of_a_page = [*ids, *(f"r{index}" for index in range(178))]
        many = await client.get("/console/compare", params={"runs": all_of_a_page})
        assert "the first 12 of the 200 chosen runs" in many.text


def test_the_command_serves_the_folder(tmp_path: Path):
    ours(tmp_path / "run")
    command = [sys.executable, "-m", "tinkex.cli", "console", "--log-dir", str(tmp_path)]
    child = subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    try:
        link = child.stdout.readline().strip()
        page = httpx.get(link, follow_redirects=True, timeout=200)
        assert page.status_code == 200
        assert "run" in page.text
    finally:
        child.terminate()
        child.wait(timeout=200)
        child.stdout.close()


async def test_a_link_to_nowhere_and_a_pipe_leave_the_list_whole(seen):
    """Whatever stands there under a run's name: it is no run, and the others are shown."""
    for name in ("dangling", "pipe", "folder", "locked"):
        (seen.root / name).mkdir()
    (seen.root / "dangling" / "metrics.jsonl").symlink_to("/nowhere/at/all")
    os.mkfifo(seen.root / "pipe" / "metrics.jsonl")
    (seen.root / "folder" / "metrics.jsonl").mkdir()
    ours(seen.root / "locked")
    (seen.root / "locked" / "config.json").unlink()
    os.mkfifo(seen.root / "locked" / "config.json")
    console = seen.client._transport.app.state.console
    console.source._looked_at = -math.inf
    listed = await seen.client.get("/console/api/runs")
    assert listed.status_code == 200, listed.text
    names = {run["name"] for run in listed.json()["runs"]}
    assert names == {"sft", "deep/cookbook", "locked"}
    assert (await seen.client.get("/console")).status_code == 200


async def test_names_and_settings_that_are_no_text_leave_the_pages_whole(seen):
    """Names on a disk are bytes, and JSON may hold half a character: neither can be sent."""
    odd = Path(os.fsdecode(os.fsencode(seen.root) + b"/caf\xe9"))
    ours(odd)
    (odd / "config.json").write_text('{"model": "\\ud800", "\\udfff": {"a": "\\u0000"}}')
    with (odd / "metrics.jsonl").open("ab") as out:
        out.write(b'{"step": 3, "\\udfff": 1.0}\n{"step": 4, "\xed\xa0\x80": 1.0}\n')
    write(odd / "rollouts.jsonl", {**answer(2, 0, 1.0), "text": "\ud800"})
    seen.client._transport.app.state.console.source._looked_at = -math.inf
    listed = await seen.client.get("/console/api/runs")
    assert listed.status_code == 200, listed.text
    ids = {run["name"]: run["run_id"] for run in listed.json()["runs"]}
    run = ids.pop("caf\ufffd")
    assert ids == seen.ids, "the others keep their addresses"
    pages = ("", "?view=settings", f"/runs/{run}", f"/runs/{run}/rollouts", f"/api/runs/{run}")
    for page in (*pages, f"/runs/{run}/metrics.csv", f"/compare?runs={run}"):
        assert (await seen.client.get(f"/console{page}")).status_code == 200, page


async def test_a_run_that_goes_while_it_is_listed_is_left_out(seen):
    (seen.root / "sft" / "metrics.jsonl").unlink()
    listed = (await seen.client.get("/console/api/runs")).json()
    assert {run["name"] for run in listed["runs"]} == {"deep/cookbook"}


async def test_what_is_not_finite_is_told_and_is_no_last_value(seen):
    """A run that diverged must not look like one that stopped at its last finite loss."""
    folder = seen.root / "diverged"
    lines = [{"step": 0, "loss": 2.0, "kl": 0.1}, {"step": 1, "loss": math.nan, "kl": math.inf}]
    write(folder / "metrics.jsonl", *lines, {"step": 2, "loss": math.nan, "kl": 0.2})
    write(seen.root / "never" / "metrics.jsonl", {"step": 0, "loss": -math.inf})
    fresh = create_app(seen.root, "s")
    transport = httpx.ASGITransport(fresh)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
        client.cookies.set("tinkex_console_1", "s")
        page = (await client.get("/console")).text
        assert page.count("NaN <small>loss</small>") == 2
        listed = (await client.get("/console/api/runs")).json()["runs"]
        run_id = next(run["run_id"] for run in listed if run["name"] == "diverged")
        page = (await client.get(f"/console/runs/{run_id}")).text
        assert "<strong>kl</strong> 1 time, last at step 1" in page
        assert "<strong>loss</strong> 2 times, last at step 2" in page
        page = (await client.get("/console/compare", params={"runs": run_id})).text
        assert "NaN or infinite in diverged" in page


@pytest.mark.parametrize(
    ("step_s", "silent_s", "status"),
    [(5, 30, "running"), (5, 90, "stopped"), (300, 600, "running"), (300, 1200, "stopped")],
)
def test_a_run_of_long_steps_runs_between_them(tmp_path: Path, step_s, silent_s, status):
    file = tmp_path / "metrics.jsonl"
    write(file, *({"step": step, "time": 1e9 + step * step_s} for step in range(4)))
    write(tmp_path / "command.json", {})
    written_at = time.time() - silent_s
    assert folder_runs._status(tmp_path, written_at) == status
