"""The person who runs a server sees the run folders of this disk in the same console."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from patience import PATIENCE_S
from visits import token_of

import tinkex

ANSWER = {"step": 0, "group": 0, "prompt": "1+1", "text": "two", "tokens": [2], "reward": 0.75}


@pytest.fixture(scope="module")
def world(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that was started beside a run folder, and the browsers of its owner and another."""
    folder = tmp_path_factory.mktemp("owners")
    cookbook = folder / "runs" / "deep" / "cookbook"
    cookbook.mkdir(parents=True)
    (cookbook / "metrics.jsonl").write_text('{"step": 0, "env/all/reward/total": 0.25}\n')
    (cookbook / "rollouts.jsonl").write_text(json.dumps(ANSWER) + "\n")
    with contextlib.ExitStack() as stack:
        with contextlib.chdir(folder):  # the server looks for runs/ where it was started
            base_url = stack.enter_context(start_server(folder, "--engine", "toy"))
        [file] = folder.rglob("serving/*.json")
        token = json.loads(file.read_text())["owner_token"]
        owner, other = (
            stack.enter_context(
                httpx.Client(base_url=base_url, follow_redirects=True, timeout=PATIENCE_S)
            )
            for _ in range(2)
        )
        owner.get("/console/owner", params={"token": token})
        yield SimpleNamespace(base_url=base_url, folder=folder, owner=owner, other=other)


def _folder_run(world: SimpleNamespace) -> dict[str, Any]:
    [run] = world.owner.get("/console/api/runs", params={"view": "folders"}).json()["runs"]
    return dict(run)


def test_the_owner_finds_folders_beside_the_servers_runs(world: SimpleNamespace):
    run = _folder_run(world)
    assert (run["name"], run["last"]) == ("deep/cookbook", 0.25)
    listed = world.owner.get("/console", params={"view": "folders"}).text
    assert "deep/cookbook" in listed
    assert "Last written" in listed
    address = f"/console/runs/{run['run_id']}"
    assert run["folder"] in world.owner.get(address).text
    assert "reward 0.75" in world.owner.get(f"{address}/rollouts").text


def test_a_folder_is_shown_to_the_owner_alone(world: SimpleNamespace):
    address = f"/console/runs/{_folder_run(world)['run_id']}"
    page = world.other.get("/console", params={"view": "folders"})
    assert page.status_code == 200
    assert "Folders" not in page.text
    assert "cookbook" not in page.text
    for path in (address, f"{address}/rollouts", f"{address}/metrics.csv", f"{address}/live"):
        assert world.other.get(path).status_code == 404


def test_a_folder_is_compared_with_a_run_of_the_server_and_never_deleted(world: SimpleNamespace):
    with tinkex.ServiceClient(base_url=world.base_url, display_name="served") as service:
        run_id = service.create_lora_training_client("toy", rank=4).model_id
    folder_id = _folder_run(world)["run_id"]
    compared = world.owner.get("/console/compare", params={"runs": f"{run_id},{folder_id}"}).text
    assert "served" in compared
    assert "deep/cookbook" in compared
    assert "Of these only the base model" not in compared, "of the folder not even these are"
    form = {"form_token": token_of(compared), "runs": folder_id, "confirmed": "yes"}
    assert world.owner.post("/console/runs/delete", data=form).status_code == 404
    described = {"form_token": form["form_token"], "run": folder_id, "name": "other"}
    assert world.owner.post("/console/describe", data=described).status_code == 404
    assert (world.folder / "runs" / "deep" / "cookbook" / "metrics.jsonl").is_file()


def _trained(world: SimpleNamespace, log_dir: Path, answer: dict[str, Any]) -> str:
    """A run of the server whose log folder has an answer; its address."""
    with tinkex.ServiceClient(base_url=world.base_url) as service:
        training = service.create_lora_training_client("toy", rank=4)
        training.log_settings({"log_dir": str(log_dir)}).result()
        saved = {"step": 1, "state_path": training.save_state("a").result().path}
    log_dir.mkdir(mode=0o755)
    (log_dir / "checkpoints.jsonl").write_text(json.dumps(saved) + "\n")
    (log_dir / "rollouts.jsonl").write_text(json.dumps(answer) + "\n")
    return f"/console/runs/{training.model_id}/rollouts"


def test_the_rollouts_of_a_servers_run_come_from_its_log_folder(
    world: SimpleNamespace, tmp_path: Path
):
    address = _trained(world, tmp_path / "logs", ANSWER)
    assert "reward 0.75" in world.owner.get(address).text
    assert "reward 0.75" not in world.other.get(address).text


def test_a_log_folder_of_another_run_is_not_read(world: SimpleNamespace, tmp_path: Path):
    """Any client can say that its log folder is this one."""
    _trained(world, tmp_path / "logs", ANSWER)
    with tinkex.ServiceClient(base_url=world.base_url) as service:
        training = service.create_lora_training_client("toy", rank=4)
        training.log_settings({"log_dir": str(tmp_path / "logs")}).result()
    page = world.owner.get(f"/console/runs/{training.model_id}/rollouts")
    assert page.status_code == 200
    assert "reward 0.75" not in page.text
