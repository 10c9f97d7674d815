"""The settings of compared runs: a difference, an equality and the unknown are three things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tinkex.server.console.colors import NUM_COLORS, NUM_HUES, color_of, colors_of
from tinkex.server.console.folder_pages import create_app
from tinkex.server.console.settings_view import settings_view


def _run(name: str, *, tells: bool = True, **settings: Any) -> dict[str, Any]:
    return {"run_id": name, "name": name, "settings": settings, "tells_settings": tells}


def test_a_setting_that_differs_is_marked_where_it_is_odd():
    view = settings_view([_run("a", lr=1e-3), _run("b", lr=1e-3), _run("c", lr=5e-4)])
    [row] = view.differing
    assert [cell.text for cell in row.cells] == ["0.001", "0.001", "0.0005"]
    assert [cell.is_odd for cell in row.cells] == [False, False, True]
    against = settings_view([_run("a", lr=1e-3), _run("b", lr=1e-3), _run("c", lr=5e-4)], "c")
    assert [cell.is_odd for cell in against.differing[0].cells] == [True, True, False]


def test_an_unset_setting_is_not_an_unknown_one():
    told, silent = _run("a", base="toy", kl=0.1), _run("b", base="toy")
    [row] = settings_view([told, silent]).differing
    assert [cell.text for cell in row.cells] == ["0.1", "–"]
    view = settings_view([told, {**silent, "tells_settings": False}])
    assert view.differing == []
    assert view.silent == ["b"]
    assert [row.name for row in view.equal] == ["base"]
    assert [(row.name, row.cells[1].text) for row in view.unknown] == [("kl", "unknown")]


def test_values_that_look_the_same_and_differ_are_not_called_equal():
    """Numbers were compared to six digits and texts to three hundred characters."""
    long = "x" * 400
    view = settings_view(
        [_run("a", lr=1e-4, data=long), _run("b", lr=1.0000001e-4, data=f"{long}y")]
    )
    assert view.equal == []
    for row in view.differing:
        assert len({cell.text for cell in row.cells}) == 2, row
    view = settings_view([_run("a", lr=1, loss=None), _run("b", lr=1.0, loss="")])
    assert view.differing == []


def test_a_setting_called_unknown_is_known():
    view = settings_view([_run("a", state="unknown"), _run("b", state="known")])
    assert [row.name for row in view.differing] == ["state"]


def test_nothing_differs_from_a_baseline_of_which_it_is_unknown():
    silent = _run("b", tells=False)
    [row] = settings_view([_run("a", kl=0.1), silent], "b").unknown
    assert [cell.is_odd for cell in row.cells] == [False, False]


def test_a_folder_says_nothing_of_what_only_a_server_knows():
    server = _run("a", lr=1e-3, **{"lora.rank": 8, "base_model": "toy"})
    folder = {**_run("b", lr=1e-3, rank=8), "folder": "/runs/b"}
    view = settings_view([server, folder])
    assert [row.name for row in view.differing] == ["rank"]
    assert [row.name for row in view.unknown] == ["base_model", "lora.rank"]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name, config in (("a", {"lr": 1e-3}), ("b", {"lr": 1e-3}), ("c", {"lr": 5e-4}), ("d", 0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\n')
        if config:
            (folder / "config.json").write_text(json.dumps(config))
    return tmp_path


async def _compared(folders: Path, *names: str) -> str:
    transport = httpx.ASGITransport(app=create_app(folders, "secret"))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers={"X-API-Key": "secret"}
    ) as client:
        listed = (await client.get("/console/api/runs")).json()["runs"]
        ids = {run["name"]: run["run_id"] for run in listed}
        asked = ",".join(ids[name] for name in names)
        return (await client.get("/console/compare", params={"runs": asked})).text


async def test_runs_are_called_equal_only_when_all_settings_are_known(folders: Path):
    """The page once said that runs with other losses and learning rates were started alike."""
    assert "None: all 1 settings of these runs are equal" in await _compared(folders, "a", "b")
    differing = await _compared(folders, "a", "b", "c")
    assert 'class="break long differs">0.0005</td>' in differing
    assert "are equal" not in differing
    silent = await _compared(folders, "a", "d")
    assert "are equal" not in silent
    assert "No <code>config.json</code> in <strong>d</strong>" in silent
    assert "may differ" in silent


def test_compared_runs_have_colours_of_their_own():
    ids = [f"run{index}" for index in range(NUM_COLORS)]
    assert len(set(colors_of(ids))) == NUM_COLORS
    assert colors_of(ids[:1]) == [color_of(ids[0])]


async def test_the_table_of_settings_is_sorted_and_marks_what_differs(folders: Path):
    transport = httpx.ASGITransport(app=create_app(folders, "secret"))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers={"X-API-Key": "secret"}
    ) as client:
        asked = {"view": "settings", "by": "lr", "down": "true"}
        page = (await client.get("/console", params=asked)).text
        small = (await client.get("/console", params={**asked, "down": "false"})).text
    assert 'aria-sort="descending"' in page
    names = [page.index(f">{name}</a></th>") for name in "ac"]
    assert names == sorted(names), "the largest first"
    assert small.index(">c</a></th>") < small.index(">a</a></th>")
    assert page.index(">d</a></th>") > max(names), "a run that says nothing comes last"
    assert small.index(">d</a></th>") > small.index(">a</a></th>")
    assert '<td class="long differs" data-label="lr">0.0005</td>' in page
    assert '<td class="long unknown" data-label="lr">unknown</td>' in page


def test_ten_compared_runs_have_ten_hues():
    ids = [f"run{index}" for index in range(NUM_HUES)]
    assert len({color % NUM_HUES for color in colors_of(ids)}) == NUM_HUES
