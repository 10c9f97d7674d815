"""Checks of what can be listed and managed: runs, checkpoints, sessions, audit and billing."""

from __future__ import annotations

import datetime as dt
import functools
from typing import Any

from tinkex.conformance.probe import Probe, shown
from tinkex.conformance.suite import check, expect


@functools.lru_cache(maxsize=4)
def _checkpoint(probe: Probe) -> str:
    """A saved checkpoint that the checks of this file share."""
    return probe.new_run().save("conformance-rest")


def _address(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


def _run_id(path: str) -> str:
    return path.removeprefix("tinker://").split("/")[0]


def _listed(probe: Probe, path: str) -> dict[str, Any]:
    rows = probe.ask("GET", f"training_runs/{_run_id(path)}/checkpoints").get("checkpoints", [])
    matching = [row for row in rows if row.get("tinker_path") == path]
    expect(len(matching) == 1, f"{path} listed once", [row.get("tinker_path") for row in rows])
    return dict(matching[0])


@check("2.6", "training runs are listed with a cursor")
def runs(probe: Probe) -> None:
    path = _checkpoint(probe)
    params = {"limit": 5, "offset": 0, "access_scope": "owned"}
    answer = probe.ask("GET", "training_runs", params=params)
    expect(len(answer.get("training_runs", [])) >= 1, "at least one run", answer)
    cursor = answer.get("cursor")
    expect(
        isinstance(cursor, dict) and {"offset", "limit", "total_count"} <= set(cursor),
        "cursor with offset, limit, total_count",
        cursor,
    )
    for row in answer["training_runs"]:
        fields = {"training_run_id", "base_model", "model_owner", "is_lora", "last_request_time"}
        expect(fields <= set(row), f"fields {sorted(fields)}", row)
    run = probe.ask("GET", f"training_runs/{_run_id(path)}", params={"access_scope": "owned"})
    expect(run.get("training_run_id") == _run_id(path), f"run {_run_id(path)}", run)


@check("2.6", "pages of runs do not overlap")
def pages(probe: Probe) -> None:
    _checkpoint(probe)
    probe.new_run()  # There are two runs at least.
    first, second = (
        [
            row["training_run_id"]
            for row in probe.ask(
                "GET",
                "training_runs",
                params={"limit": 1, "offset": offset, "access_scope": "owned"},
            )["training_runs"]
        ]
        for offset in (0, 1)
    )
    expect(len(first) == len(second) == 1 and first != second, "one run each", (first, second))


@check("2.6", "checkpoints are listed by run and by user, newest first")
def checkpoints(probe: Probe) -> None:
    row = _listed(probe, _checkpoint(probe))
    expect(row.get("checkpoint_type") == "training", "type training", row)
    expect(row.get("checkpoint_id") == "weights/conformance-rest", "id weights/...", row)
    answer = probe.ask("GET", "checkpoints", params={"limit": 100, "offset": 0})
    times = [dt.datetime.fromisoformat(item["time"]) for item in answer["checkpoints"]]
    expect(times == sorted(times, reverse=True), "newest first", [str(t) for t in times[:5]])


@check("2.6", "weights_info says what a checkpoint is")
def weights_info(probe: Probe) -> None:
    answer = probe.ask("POST", "weights_info", {"tinker_path": _checkpoint(probe)})
    expect(answer.get("base_model") == probe.model, f"base_model {probe.model}", answer)
    expect(answer.get("is_lora") is True and answer.get("lora_rank") == 4, "LoRA, rank 4", answer)


@check("2.6", "publish and unpublish change what is listed")
def publish(probe: Probe) -> None:
    path = _checkpoint(probe)
    for verb, public in (("POST", True), ("DELETE", False)):
        probe.ask(verb, f"{_address(path)}/publish")
        expect(_listed(probe, path).get("public") is public, f"public {public}", "the opposite")


@check("2.6", "a TTL is set, cleared by null, and refused below an hour")
def ttl(probe: Probe) -> None:
    path = _checkpoint(probe)
    probe.ask("PUT", f"{_address(path)}/ttl", {"ttl_seconds": 7200})
    expect(_listed(probe, path).get("expires_at") is not None, "expires_at", "null")
    probe.ask("PUT", f"{_address(path)}/ttl", {"ttl_seconds": None})
    expect(_listed(probe, path).get("expires_at") is None, "no expires_at", "one")
    answer = probe.call("PUT", f"{_address(path)}/ttl", {"ttl_seconds": 10})
    expect(answer.status_code in (400, 422), "400 for 10 seconds", shown(answer))


@check("2.6", "a deleted checkpoint is gone")
def delete(probe: Probe) -> None:
    path = probe.new_run().save("conformance-doomed")
    answer = probe.call("DELETE", _address(path))
    expect(answer.is_success, "2xx from DELETE", shown(answer))
    rows = probe.ask("GET", f"training_runs/{_run_id(path)}/checkpoints").get("checkpoints", [])
    expect(path not in [row["tinker_path"] for row in rows], "not listed", path)
    again = probe.call("POST", "weights_info", {"tinker_path": path})
    expect(again.status_code in (400, 404), "404 from weights_info", shown(again))


@check("2.6", "copy_weights makes a second checkpoint")
def copy(probe: Probe) -> None:
    body = {"source_path": _checkpoint(probe), "destination_project_id": "conformance"}
    path = probe.ask("POST", "copy_weights", body).get("tinker_path", "")
    expect(str(path).startswith("tinker://") and path != body["source_path"], "another path", path)
    probe.ask("POST", "weights_info", {"tinker_path": path})


@check("2.6", "external weights download through signed URLs as a PEFT adapter")
def external(probe: Probe) -> None:
    run = probe.new_run()
    path = str(run.submit("save_weights_external", path="conformance-external").get("path"))
    answer = probe.ask("GET", f"{_address(path)}/external_weights_urls")
    urls = answer.get("urls", {})
    expect("adapter_config.json" in urls, "adapter_config.json among the files", sorted(urls))
    fetched = probe.http.get(urls["adapter_config.json"])
    expect(fetched.is_success and b"base_model" in fetched.content, "the file", shown(fetched))


@check("2.6", "sessions are listed and described")
def sessions(probe: Probe) -> None:
    _checkpoint(probe)
    params = {"limit": 100, "offset": 0, "access_scope": "owned"}
    listed = probe.ask("GET", "sessions", params=params).get("sessions", [])
    expect(probe.session_id in listed, f"{probe.session_id} listed", listed[:5])
    session = probe.ask("GET", f"sessions/{probe.session_id}", params={"access_scope": "owned"})
    expect({"training_run_ids", "sampler_ids"} <= set(session), "runs and samplers", session)


@check("7.9", "sessions are searched")
def search(probe: Probe) -> None:
    body = {"session_id": probe.session_id, "owner": {"type": "own"}, "limit": 5}
    rows = probe.ask("POST", "sessions/search", {**body, "user_metadata": {}}).get("sessions", [])
    ids = [row.get("session_id") for row in rows]
    expect(ids == [probe.session_id], f"[{probe.session_id}]", ids)


@check("2.6", "the audit log answers")
def audit(probe: Probe) -> None:
    answer = probe.ask("GET", "audit", params={"event_type": "all"})
    expect(isinstance(answer.get("entries"), list), "entries, a list", answer)


@check("2.6", "usage is metered by the hour")
def billing(probe: Probe) -> None:
    now = dt.datetime.now(dt.UTC).replace(minute=0, second=0, microsecond=0)
    hour, form = dt.timedelta(hours=1), "%Y-%m-%dT%H:%M:%SZ"
    params = {
        "starting_on": f"{now - hour:{form}}",
        "ending_before": f"{now + hour:{form}}",
    }
    answer = probe.ask("GET", "billing/usage/events", params=params)
    expect(isinstance(answer.get("data"), list), "data, a list", answer)


@check("2.6", "another run's id is 404")
def foreign(probe: Probe) -> None:
    answer = probe.call("GET", "training_runs/no-such:train:0", params={"access_scope": "owned"})
    expect(answer.status_code == 404, "404", shown(answer))
