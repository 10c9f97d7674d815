"""Names, notes, tags and settings of runs; the playground by names; the audit log, folded."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from patience import PATIENCE_S
from visits import HOSTILE, token_of

import tinkex
from tinkex.server.console.server_page import _folded
from tinkex.store import AuditEntry, Store


@pytest.fixture(scope="module")
def world(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three runs: two told their settings, the third none."""
    folder: Path = tmp_path_factory.mktemp("descriptions")
    told = ({"learning_rate": 1e-3, "loss_fn": "ppo"}, {"learning_rate": 5e-4, "loss_fn": "ppo"})
    with start_server(folder, "--engine", "toy") as base_url:
        runs = []
        with tinkex.ServiceClient(base_url=base_url) as service:
            for name, settings in (("one", told[0]), ("two", told[1]), ("three", None)):
                training = service.create_lora_training_client("toy", rank=4, seed=1, name=name)
                if settings:
                    training.log_settings(settings).result()
                training.save_weights_for_sampler("final").result()
                runs.append(training.model_id)
        with httpx.Client(base_url=base_url, follow_redirects=True, timeout=PATIENCE_S) as client:
            yield SimpleNamespace(client=client, runs=runs)


def test_settings_that_a_run_told_are_compared(world: SimpleNamespace):
    one, two, three = world.runs
    page = world.client.get("/console/compare", params={"runs": f"{one},{two}"}).text
    assert 'Settings that differ <span class="count">1</span>' in page
    assert "reported no settings" not in page
    silent = world.client.get("/console/compare", params={"runs": f"{one},{three}"}).text
    assert "No settings reported by <strong>three</strong>" in silent
    assert "are equal" not in silent
    same = world.client.get("/console/compare", params={"runs": f"{one},{one}"}).text
    assert "Choose a second run" in same


def test_a_run_is_renamed_noted_and_tagged(world: SimpleNamespace):
    run = world.runs[0]
    form = {"form_token": token_of(world.client.get("/console").text), "run": run}
    form |= {"name": "math, take 2", "note": f"better {HOSTILE}", "tags": "a, b, a"}
    page = world.client.post("/console/describe", data=form).text
    assert "<h1>" in page
    assert "math, take 2</h1>" in page
    assert HOSTILE not in page
    assert "better &lt;script&gt;" in page
    [row] = [
        row for row in world.client.get("/console/api/runs").json()["runs"] if row["run_id"] == run
    ]
    assert (row["name"], row["tags"]) == ("math, take 2", ["a", "b"])
    assert (
        world.client.post("/console/describe", data={**form, "form_token": "x"}).status_code == 403
    )
    refused = world.client.post("/console/describe", data={**form, "name": "two\nlines"})
    assert 400 <= refused.status_code < 500


def test_tags_beyond_the_bounds_are_refused_and_never_cut(world: SimpleNamespace):
    client, run = world.client, world.runs[2]
    form = {"form_token": token_of(client.get("/console").text), "run": run, "name": "three"}
    tags = [f"{number:02}{'x' * 98}" for number in range(64)]
    assert client.post("/console/describe", data={**form, "tags": ", ".join(tags)}).is_success
    assert client.get(f"/console/api/runs/{run}").json()["tags"] == tags
    for wrong in ("y" * 101, ",".join([*tags, "more"])):
        refused = client.post("/console/describe", data={**form, "tags": wrong})
        assert 400 <= refused.status_code < 500
    assert client.get(f"/console/api/runs/{run}").json()["tags"] == tags


def test_saving_a_note_gives_a_run_no_name_and_no_tags_of_its_own(world: SimpleNamespace):
    """What is shown may come from the session, whose name and tags may change."""
    client = world.client
    with tinkex.ServiceClient(
        base_url=str(client.base_url), display_name="of the session", user_metadata={}
    ) as service:
        run = service.create_lora_training_client("toy", rank=4).model_id
    page = client.get(f"/console/runs/{run}").text
    assert 'name="name" value="" maxlength="200" placeholder="of the session"' in page
    form = {"form_token": token_of(page), "run": run, "name": "", "tags": "", "note": "a note"}
    assert client.post("/console/describe", data=form).is_success
    told = client.get(f"/console/api/runs/{run}").json()
    assert (told["name"], told["own_name"], told["note"]) == ("of the session", "", "a note")
    client.post("/console/describe", data={**form, "name": "its own"})
    assert client.get(f"/console/api/runs/{run}").json()["own_name"] == "its own"
    client.post("/console/describe", data=form)
    assert client.get(f"/console/api/runs/{run}").json()["name"] == "of the session"


def test_a_tag_has_no_comma(world: SimpleNamespace):
    client, run = world.client, world.runs[1]
    refused = client.put(f"/tinkex/v1/runs/{run}", json={"tags": ["a, b"]})
    assert 400 <= refused.status_code < 500
    assert "must have no comma" in refused.text
    assert client.get(f"/console/api/runs/{run}").json()["tags"] == []


def test_tags_of_a_session_stay_whole_when_a_note_is_saved(world: SimpleNamespace):
    """Official clients may tag their session with anything, commas included."""
    client = world.client
    body = {"tags": ["lr 1e-3, take 2"], "user_metadata": {}, "sdk_version": "0.36.0"}
    session = client.post("/api/v1/create_session", json=body).json()["session_id"]
    made = {"session_id": session, "model_seq_id": 0, "base_model": "toy"}
    client.post("/api/v1/create_model", json={**made, "lora_config": {"rank": 4}})
    run = f"{session}:train:0"
    page = client.get(f"/console/runs/{run}").text
    shown = "lr 1e-3, take 2"
    form = {"form_token": token_of(page), "run": run, "name": "", "tags": shown, "note": "n"}
    assert client.post("/console/describe", data=form).is_success
    told = client.get(f"/console/api/runs/{run}").json()
    assert (told["tags"], told["note"]) == ([shown], "n")


def test_runs_are_filtered_by_project(world: SimpleNamespace):
    client = world.client
    for project in ("proj-a", "proj-b"):
        with tinkex.ServiceClient(
            base_url=str(client.base_url), project_id=project, display_name=f"in {project}"
        ) as service:
            service.create_lora_training_client("toy", rank=4)
    found = client.get("/console/api/runs", params={"project": "proj-a"}).json()
    assert [run["name"] for run in found["runs"]] == ["in proj-a"]
    assert found["projects"] == ["proj-a", "proj-b"]
    page = client.get("/console", params={"project": "proj-a"}).text
    assert "<option selected>proj-a</option>" in page
    none = client.get("/console/api/runs", params={"project": "proj"}).json()
    assert none["total"] == 0, "a project is named whole"


def test_the_playground_has_names(world: SimpleNamespace):
    page = world.client.get("/console/playground").text
    assert '/sampler_weights/final">two · final</option>' in page
    assert '<optgroup label="Base models">' in page


def test_the_playground_never_puts_another_model_in_place_of_the_chosen(world: SimpleNamespace):
    """It lists the newest checkpoints; *Try* of an older one talked to the base model."""
    old = "tinker://older:train:0/sampler_weights/final"
    page = world.client.get("/console/playground", params={"model": old}).text
    assert f'<option value="{old}" selected>' in page
    assert page.count(" selected>") == 1


def test_a_page_beyond_the_last_says_so(world: SimpleNamespace):
    for view in ("", "settings"):
        page = world.client.get("/console", params={"page": 7, "view": view}).text
        assert "There is no page 8" in page
        assert "No runs yet" not in page


def test_repeats_in_the_audit_log_are_one_row():
    def entry(at: float, event: str, **details: object) -> AuditEntry:
        return AuditEntry(user_id="ann", event=event, timestamp=at, details=details)

    logins = [entry(100 - i, "login", by="token", address="127.0.0.1") for i in range(20)]
    rows = _folded([*logins[:10], entry(50, "key_added", key_id=3), *logins[10:]])
    assert [(row["event"], row["times"]) for row in rows] == [("login", 20), ("key_added", 1)]
    assert rows[0]["at"] > rows[0]["since"]


def test_a_form_sent_back_as_it_was_shown_changes_nothing(start_server: Any, tmp_path: Path):
    """The name and tags of a session stay its session's, and do not become the run's own."""
    with start_server(tmp_path, "--engine", "toy") as base_url:
        how = {"display_name": "night", "tags": ["a", "b, c"]}
        with tinkex.ServiceClient(base_url=base_url, **how) as service:
            run = service.create_lora_training_client("toy", rank=4).model_id
        with httpx.Client(base_url=base_url, follow_redirects=True, timeout=PATIENCE_S) as client:
            form = {"form_token": token_of(client.get("/console").text), "run": run}
            form |= {"name": "night", "note": "mine", "tags": "a, b, c"}
            assert client.post("/console/describe", data=form).is_success
    store = Store.in_folder(tmp_path)
    model = store.models.get(run)
    store.close()
    assert model is not None
    assert (model.name, model.tags, model.note) == (None, None, "mine")


def test_a_tag_has_no_comma_whoever_gives_it(world: SimpleNamespace):
    """The console separates tags by commas; elsewhere a comma is refused, never split."""
    base_url = str(world.client.base_url)
    rest = tinkex.RestClient(base_url=base_url)
    with pytest.raises(tinkex.InvalidInputError, match="comma"):
        rest.describe_run(world.runs[1], tags=["a,b"])
    body = {"tags": ["a,b"]}
    answer = world.client.put(f"/tinkex/v1/runs/{world.runs[1]}", json=body)
    assert (answer.status_code, "comma" in answer.text) == (400, True)


def test_the_command_line_and_the_console_tell_the_same_state(
    start_server: Any, tmp_path: Path
) -> None:
    """Of runs that were ended in every way; `tinkex run list` prints what REST says."""
    with start_server(tmp_path, "--engine", "toy") as base_url, contextlib.ExitStack() as clients:
        for how in ("success", "interrupted", "errored", "active"):
            service = clients.enter_context(tinkex.ServiceClient(base_url=base_url))
            service.create_lora_training_client("toy", rank=4, name=how)
            if how != "active":
                service.close(how).result()
        stopped = clients.enter_context(tinkex.ServiceClient(base_url=base_url))
        training = stopped.create_lora_training_client("toy", rank=4, name="stopped by its owner")
        rest = tinkex.RestClient(base_url=base_url)
        rest.stop_run(training.model_id).result()
        with pytest.raises(tinkex.APIStatusError, match="stopped by its owner") as told:
            training.save_state("late").result()  # nothing was queued when it came
        assert told.value.status_code == 410
        listed = rest.list_training_runs().result().training_runs
        of_rest = {run.name: run.state for run in listed}
        rows = httpx.get(f"{base_url}/console/api/runs", timeout=PATIENCE_S).json()["runs"]
        assert {row["name"]: row["status"] for row in rows} == of_rest
        assert of_rest == {
            "success": "finished",
            "interrupted": "stopped",
            "errored": "failed",
            "active": "idle",
            "stopped by its owner": "stopped",
        }
        command = [sys.executable, "-m", "tinkex.cli", "run", "list", "--json"]
        shown = subprocess.run(
            [*command, "--base-url", base_url], capture_output=True, check=True, timeout=300
        )
        runs = json.loads(shown.stdout)["runs"]
        assert {run["name"]: run["state"] for run in runs} == of_rest
        for state in ("finished", "stopped", "failed", "idle"):
            query = {"status": state}
            page = httpx.get(
                f"{base_url}/console/api/runs", params=query, timeout=PATIENCE_S
            ).json()["runs"]
            expected = {name for name, one in of_rest.items() if one == state}
            assert {row["name"] for row in page} == expected, "the filter has the same words"


def test_a_console_url_is_a_page_of_the_right_server(start_server: Any, tmp_path: Path) -> None:
    with start_server(tmp_path, "--engine", "toy") as base_url:
        with tinkex.ServiceClient(base_url=base_url) as service:
            urls = [service.get_console_url()]
            training = service.create_lora_training_client("toy", rank=4)
            training.save_state("a").result()
            urls += [service.get_console_url(), training.get_console_url()]
            for url in urls:
                assert url.startswith(base_url), url
                answer = httpx.get(url, follow_redirects=True, timeout=PATIENCE_S)
                assert (answer.status_code, "Tinkex" in answer.text) == (200, True), url
