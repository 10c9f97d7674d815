"""Pages show a visitor their own runs and nothing else; changes need a form of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from patience import PATIENCE_S
from perfetto_slices import perfetto_slices
from visits import HOSTILE, token_of, visitor


@pytest.fixture(scope="module")
def world(start_server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A toy server, and a run of ann's with hostile names, five steps and two checkpoints."""
    import tinkex

    folder = tmp_path_factory.mktemp("console")
    keys = ("--api-key", "tml-ann=ann", "--api-key", "tml-ben=ben")
    with start_server(folder, "--engine", "toy", *keys) as base_url:
        service = tinkex.ServiceClient(base_url=base_url, api_key="tml-ann", display_name=HOSTILE)
        training = service.create_lora_training_client(base_model="toy", rank=4)
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
        )
        for step in range(5):
            training.forward_backward([datum], "cross_entropy").result()
            training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result()
            told = {"reward": step / 5, HOSTILE: 1.0, "learning_rate": 7.0}
            training.log_metrics(told, step=step).result()
        path = training.save_state("end").result().path
        sampler = training.save_weights_for_sampler("final").result().path
        made = SimpleNamespace(
            base_url=base_url, run_id=training.model_id, path=path, sampler=sampler, folder=folder
        )
        with visitor(made, "tml-ann") as ann:
            token = token_of(ann.get("/console").text)
            form = {"run": made.run_id, "form_token": token, "tags": f'é "quoted", {HOSTILE}, a'}
            assert ann.post("/console/describe", data=form).status_code == 200
        yield made
        service.close()


def test_a_stranger_is_sent_to_the_login(world):
    answer = httpx.get(f"{world.base_url}/console", timeout=PATIENCE_S)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
    assert httpx.get(f"{world.base_url}/console/api/runs", timeout=PATIENCE_S).status_code == 401
    assert httpx.get(world.base_url, timeout=PATIENCE_S).headers["location"] == "/console"


def test_a_wrong_key_is_told_and_leaves_no_cookie(world):
    answer = httpx.post(
        f"{world.base_url}/console/login", data={"key": "tml-wrong"}, timeout=PATIENCE_S
    )
    assert answer.status_code == 401
    assert "unknown here" in answer.text
    assert not answer.cookies


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(world):
    answer = httpx.post(
        f"{world.base_url}/console/login", data={"key": "tml-ann"}, timeout=PATIENCE_S
    )
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_the_list_shows_what_a_run_is_and_how_it_goes(world):
    with visitor(world, "tml-ann") as ann:
        (run,) = ann.get("/console/api/runs").json()["runs"]
        page = ann.get("/console").text
    assert (run["run_id"], run["steps"], run["rank"]) == (world.run_id, 5, 4)
    assert (run["metric"], run["last"]) == ("reward", 0.8)
    assert f'href="/console/runs/{world.run_id}"' in page
    assert "<polyline" in page


def test_a_run_has_the_servers_curves_and_the_clients_own(world):
    with visitor(world, "tml-ann") as ann:
        told = ann.get(f"/console/api/runs/{world.run_id}").json()
    curves = told["curves"]
    assert {"loss_per_token", "grad_norm", "learning_rate", "reward"} <= set(curves)
    assert curves["loss_per_token"]["steps"] == [1, 2, 3, 4, 5]
    assert curves["reward"]["values"] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert curves["loss_per_token"]["values"][0] > curves["loss_per_token"]["values"][-1]


@pytest.mark.parametrize(
    "path",
    [
        "/console/runs/{run}",
        "/console/api/runs/{run}",
        "/console/api/runs/{run}/live",
        "/console/runs/{run}/trace",
        "/console/compare?runs={run}",
        "/console/api/compare?runs={run}",
    ],
)
def test_another_users_run_does_not_exist(world, path: str):
    with visitor(world, "tml-ben") as ben:
        assert ben.get(path.format(run=world.run_id)).status_code == 404
        assert ben.get("/console/api/runs").json()["runs"] == []


def test_the_owner_downloads_the_timeline_of_a_run(world):
    with visitor(world, "tml-ann") as ann:
        page = ann.get(f"/console/runs/{world.run_id}").text
        assert f'href="/console/runs/{world.run_id}/trace" download' in page
        assert "Timeline (Perfetto)" in page
        answer = ann.get(f"/console/runs/{world.run_id}/trace")
    assert answer.headers["content-type"] == "application/octet-stream"
    named = answer.headers["content-disposition"]
    assert named == 'attachment; filename="script-alert-1-script.pftrace"', "no <, no slash"
    ran = [one.name for one in perfetto_slices(answer.content)[world.run_id, "requests"]]
    assert ran.count("optim_step") == 5


def test_hostile_names_stay_text(world):
    with visitor(world, "tml-ann") as ann:
        for path in ("/console", f"/console/runs/{world.run_id}", "/console/playground"):
            page = ann.get(path)
            assert HOSTILE not in page.text, path
            policy = page.headers["content-security-policy"]
            assert "script-src 'self'" in policy
            assert "unsafe" not in policy


def test_a_change_needs_a_form_of_this_page(world):
    with visitor(world, "tml-ann") as ann:
        token = token_of(ann.get("/console").text)
        body = {"path": world.path, "action": "publish"}
        assert ann.post("/console/checkpoints", data=body).status_code == 403
        forged = {**body, "form_token": "0" * 40}
        assert ann.post("/console/checkpoints", data=forged).status_code == 403
        foreign = {**body, "form_token": "\u00e9" * 40}
        assert ann.post("/console/checkpoints", data=foreign).status_code == 403
        in_header = {"x-form-token": b"\xe9" * 40}
        refused = ann.post("/console/checkpoints", data=body, headers=in_header)
        assert refused.status_code == 403
        page = ann.post("/console/checkpoints", data={**body, "form_token": token})
        assert page.status_code == 200
        assert "every user" in page.text
        back = {"path": world.path, "action": "unpublish", "form_token": token}
        assert "every user" not in ann.post("/console/checkpoints", data=back).text


def test_a_checkpoint_is_kept_for_a_while(world):
    with visitor(world, "tml-ann") as ann:
        body = {
            "path": world.path,
            "action": "ttl",
            "form_token": token_of(ann.get("/console").text),
        }
        assert (
            "in 29 days"
            in ann.post("/console/checkpoints", data={**body, "ttl_seconds": "2592000"}).text
        )
        refused = ann.post("/console/checkpoints", data={**body, "ttl_seconds": "5"})
        assert (refused.status_code, "one hour" in refused.text) == (400, True)
        unset = ann.post("/console/checkpoints", data={**body, "ttl_seconds": ""})
        assert "in 29 days" in unset.text, "the choice that says how it is changes nothing"
        assert (
            "in 29 days"
            not in ann.post("/console/checkpoints", data={**body, "ttl_seconds": "0"}).text
        )


def test_a_checkpoint_is_downloaded_by_its_owner_alone(world):
    with visitor(world, "tml-ann") as ann, visitor(world, "tml-ben") as ben:
        answer = ann.get("/console/download", params={"path": world.sampler})
        assert b"adapter" in answer.content
        assert "attachment" in answer.headers["content-disposition"]
        assert ben.get("/console/download", params={"path": world.sampler}).status_code == 404


def test_the_time_of_a_step_is_split_into_its_parts(world):
    with visitor(world, "tml-ann") as ann:
        curves = ann.get(f"/console/api/runs/{world.run_id}").json()["curves"]
    parts = ("pass_time_s", "optim_time_s", "save_time_s", "other_time_s")
    whole = curves["step_time_s"]["values"]
    summed = [sum(values) for values in zip(*(curves[p]["values"] for p in parts), strict=True)]
    assert summed == pytest.approx(whole, abs=0.005)


def test_a_name_of_the_servers_own_does_not_mix_with_what_a_client_logs(world):
    with visitor(world, "tml-ann") as ann:
        curves = ann.get(f"/console/api/runs/{world.run_id}").json()["curves"]
    assert curves["learning_rate"]["values"] == pytest.approx([0.01] * 5)
    assert curves["learning_rate (logged)"]["values"] == [7.0] * 5


@pytest.mark.parametrize(
    ("asked", "num"),
    [
        ({"q": "no such"}, 0),
        ({"q": "alert"}, 1),
        ({"tag": 'é "quoted"'}, 1),
        ({"tag": "quoted"}, 0),
        ({"tag": "%"}, 0),
        ({"model": "toy"}, 1),
        ({"model": "other"}, 0),
        ({"status": "idle", "sort": "active"}, 1),
        ({"status": "running"}, 0),
        ({"status": "lost"}, 0),
        ({"status": "finished", "sort": "oldest"}, 0),
    ],
)
def test_runs_are_filtered(world, asked: dict, num: int):
    with visitor(world, "tml-ann") as ann:
        assert ann.get("/console/api/runs", params=asked).json()["total"] == num
        assert ann.get("/console", params=asked).status_code == 200


def test_another_user_cannot_change_a_checkpoint(world):
    with visitor(world, "tml-ben") as ben:
        token = token_of(ben.get("/console").text)
        body = {"path": world.path, "action": "delete", "form_token": token}
        assert ben.post("/console/checkpoints", data=body).status_code == 404


def test_only_files_of_the_console_are_served(world):
    with httpx.Client(base_url=world.base_url, timeout=PATIENCE_S) as client:
        assert client.get("/console/static/console.css").status_code == 200
        for name in ("..%2fpages.py", "pages.py", "%2e%2e/pages.py", "nothing.js"):
            assert client.get(f"/console/static/{name}").status_code == 404


def test_every_page_asks_this_server_only():
    """No address of another host stands in any template, script or style."""
    import tinkex.server.console as package

    folder = Path(package.__file__).parent
    for file in [*folder.glob("templates/*"), *folder.glob("static/*")]:
        addresses = re.findall(r"https?://[^\s\"']+", file.read_text())
        assert [a for a in addresses if not a.startswith("http://www.w3.org/")] == [], file


def test_a_link_with_a_token_logs_in(world):
    answer = httpx.post(
        f"{world.base_url}/api/v1/auth/token", headers={"X-API-Key": "tml-ann"}, json={}
    )
    with httpx.Client(base_url=world.base_url, follow_redirects=True, timeout=PATIENCE_S) as client:
        page = client.get("/console/enter", params={"token": answer.json()["jwt"]})
        assert page.url.path == "/console"
        assert world.run_id in page.text


def test_log_out_ends_it(world):
    with visitor(world, "tml-ann") as ann:
        token = token_of(ann.get("/console").text)
        ann.post("/console/logout", data={"form_token": token})
        assert ann.get("/console").url.path == "/console/login"
