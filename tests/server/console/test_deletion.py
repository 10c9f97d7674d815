"""Deleting runs and checkpoints from a page: asked first, own runs only, never half."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from visits import token_of, visitor

import tinkex

KEYS = ("tml-ann", "tml-ben")


@pytest.fixture(scope="module")
def world(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder: Path = tmp_path_factory.mktemp("deletion")
    keys = [option for key in KEYS for option in ("--api-key", f"{key}={key[-3:]}")]
    with start_server(folder, "--engine", "toy", *keys) as base_url:
        yield SimpleNamespace(base_url=base_url)


def _run(world: SimpleNamespace, *, is_public: bool = False) -> SimpleNamespace:
    """A run that has ended, with one checkpoint."""
    with tinkex.ServiceClient(base_url=world.base_url, api_key=KEYS[0]) as service:
        training = service.create_lora_training_client("toy", rank=4)
        path = training.save_state("end").result().path
        if is_public:
            service.create_rest_client().publish_checkpoint_from_tinker_path(path).result()
        return SimpleNamespace(run_id=training.model_id, path=path)


def _post(client: httpx.Client, address: str, **given: Any) -> httpx.Response:
    form = {"form_token": token_of(client.get("/console").text), **given}
    return client.post(address, data=form)


def _delete(client: httpx.Client, *run_ids: str, **given: str) -> httpx.Response:
    return _post(client, "/console/runs/delete", runs=list(run_ids), **given)


def test_runs_are_deleted_after_a_yes(world: SimpleNamespace):
    one, two = _run(world), _run(world)
    with visitor(world, KEYS[0]) as ann:
        asked = _delete(ann, one.run_id, two.run_id)
        assert (asked.status_code, "Delete 2 runs?" in asked.text) == (200, True)
        for run in (one, two):
            assert ann.get(f"/console/runs/{run.run_id}").status_code == 200, "nobody said yes"
        assert _delete(ann, one.run_id, two.run_id, confirmed="yes").url.path == "/console"
        for run in (one, two):
            assert ann.get(f"/console/runs/{run.run_id}").status_code == 404


def test_after_a_deletion_the_list_is_filtered_as_before(world: SimpleNamespace):
    with visitor(world, KEYS[0]) as ann:
        for address, leads_to in (("?q=gone&page=0", "q=gone&page=0"), ("/runs/x", "")):
            ann.headers["referer"] = f"{ann.base_url}/console{address}".replace(
                "//console", "/console"
            )
            run = _run(world).run_id
            assert _delete(ann, run, confirmed="yes").url.query.decode() == leads_to


def test_another_users_run_and_a_forged_form_delete_nothing(world: SimpleNamespace):
    run = _run(world)
    with visitor(world, KEYS[1]) as ben:
        assert _delete(ben, run.run_id, confirmed="yes").status_code == 404
    with visitor(world, KEYS[0]) as ann:
        forged = {"runs": run.run_id, "confirmed": "yes", "form_token": "x"}
        assert ann.post("/console/runs/delete", data=forged).status_code == 403
        assert ann.get(f"/console/runs/{run.run_id}").status_code == 200


def test_a_run_that_cannot_go_is_named_and_the_others_go(world: SimpleNamespace):
    published, plain = _run(world, is_public=True), _run(world)
    with visitor(world, KEYS[0]) as ann:
        told = _delete(ann, published.run_id, plain.run_id, confirmed="yes")
        assert told.status_code == 400
        assert "1 of 2 runs were deleted" in told.text
        assert "published" in told.text
        assert told.headers["content-type"].startswith("text/html"), "a page, for a person"
        assert ann.get(f"/console/runs/{published.run_id}").status_code == 200
        assert ann.get(f"/console/runs/{plain.run_id}").status_code == 404


def test_a_checkpoint_is_deleted_after_a_yes(world: SimpleNamespace):
    run = _run(world)
    asked = {"path": run.path, "action": "delete"}
    with visitor(world, KEYS[0]) as ann:
        page = _post(ann, "/console/checkpoints", **asked).text
        assert "Delete the checkpoint end?" in page
        assert ann.get("/console/download", params={"path": run.path}).status_code == 200
        _post(ann, "/console/checkpoints", **asked, confirmed="yes")
        assert ann.get("/console/download", params={"path": run.path}).status_code == 404
