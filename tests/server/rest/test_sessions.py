"""Sessions, traces, audit and usage over HTTP."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
import store_rows as rows
from perfetto_slices import perfetto_slices
from rest_world import World

from tinkex.server.files.sweeper import Sweeper
from tinkex.server.process.config import ServerConfig
from tinkex.store import UsageCount


async def test_a_session_shows_its_runs_and_samplers(world: World) -> None:
    world.store.sampling.create(rows.sampling(model_path="tinker://s:train:0/weights/x"))
    body = await world.call("GET", "/sessions/s?access_scope=owned", 200)
    assert body["training_run_ids"] == ["s:train:0"]
    assert body["sampler_ids"] == ["s:sample:0"]
    assert body["user_metadata"] == {"team": "red"}
    sampler = await world.call("GET", "/samplers/s:sample:0", 200)
    assert sampler["model_path"] == "tinker://s:train:0/weights/x"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/sessions/s", None),
        ("POST", "/sessions/s/finish", {"reason": {"type": "success"}, "detail": None}),
        ("PUT", "/sessions/s/project", {"project_id": "p"}),
        ("GET", "/sessions/s/trace_export", None),
        ("GET", "/training_runs/s:train:0/trace_export", None),
        ("GET", "/samplers/s:sample:0", None),
    ],
)
async def test_a_session_does_not_exist_for_others(
    world: World, method: str, path: str, body: object
) -> None:
    world.store.sampling.create(rows.sampling())
    await world.call(method, path, 404, key="tml-bob", json=body)
    listed = await world.call("GET", "/sessions", 200, key="tml-bob")
    assert listed == {"sessions": []}


async def test_finishing_ends_a_session_once(world: World) -> None:
    first = {"reason": {"type": "errored"}, "detail": "boom"}
    await world.call("POST", "/sessions/s/finish", 204, json=first)
    second = {"reason": {"type": "success"}, "detail": None}
    await world.call("POST", "/sessions/s/finish", 204, json=second)
    body = await world.call("POST", "/sessions/search", 200, json={})
    status = body["sessions"][0]["status"]
    assert status == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "boom"}
    assert world.finished == ["s"]


@pytest.mark.parametrize("reason", ["won", "", None, 3])
async def test_an_unknown_reason_is_refused(world: World, reason: object) -> None:
    await world.call("POST", "/sessions/s/finish", 400, json={"reason": {"type": reason}})


async def test_a_search_finds_by_every_condition(world: World) -> None:
    world.store.sessions.create(
        rows.session("t", display_name="Big Run", project_id="p", user_metadata={"team": "blue"})
    )
    done = {"type": "client_finished", "reason": {"type": "success"}}
    world.store.sessions.create(rows.session("u", status=done))
    world.store.sessions.create(rows.session("foreign", "bob"))

    async def found(**conditions: Any) -> list[str]:
        body = await world.call("POST", "/sessions/search", 200, json=conditions)
        return sorted(session["session_id"] for session in body["sessions"])

    assert await found() == ["s", "t", "u"]
    assert await found(display_name="run big") == ["t"]
    assert await found(session_id="s", display_name="big") == ["s", "t"]
    assert await found(project_ids=["p"]) == ["t"]
    assert await found(user_metadata={"team": "red"}) == ["s"]
    assert await found(statuses=[{"type": "active"}]) == ["s", "t"]
    assert await found(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == []
    assert await found(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == ["u"]
    assert await found(owner={"type": "user", "owner_urns": ["tml:user:bob"]}) == []
    assert await found(owner={"type": "user", "owner_urns": ["tml:user:ann"]}) == ["s", "t", "u"]


async def test_a_search_summary_counts_checkpoints(world: World) -> None:
    await world.save("a")
    await world.save("b")
    body = await world.call("POST", "/sessions/search", 200, json={"session_id": "s"})
    (summary,) = body["sessions"]
    assert summary["checkpoints_count"] == 2
    assert summary["checkpoint_storage_bytes"] == 2 * 10242
    assert summary["owner"] == "tml:user:ann"


async def test_a_cursor_walks_through_all_sessions_once(world: World) -> None:
    for n in range(9):
        world.store.sessions.create(rows.session(f"x{n}", created_at=time.time() + n / 3))
    seen: list[str] = []
    cursor = None
    while True:
        request = {"limit": 4, "cursor": cursor}
        body = await world.call("POST", "/sessions/search", 200, json=request)
        seen += [session["session_id"] for session in body["sessions"]]
        cursor = body.get("next_cursor")
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) == 10


async def test_moving_a_session_is_audited(world: World) -> None:
    await world.call("PUT", "/sessions/s/project", 204, json={"project_id": "p"})
    world.store.flush()
    body = await world.call("GET", "/audit?event_type=projects", 200)
    assert [entry["event"] for entry in body["entries"]] == ["project_session_assigned"]
    assert body["entries"][0]["event_details"]["to"] == "p"
    runs = await world.call("GET", "/training_runs?project_id=p", 200)
    assert [run["training_run_id"] for run in runs["training_runs"]] == ["s:train:0"]


async def test_the_audit_log_tells_the_life_of_a_checkpoint(world: World) -> None:
    await world.save()
    one = "/training_runs/s:train:0/checkpoints/weights/first"
    await world.call("POST", f"{one}/publish", 204)
    await world.call("DELETE", one, 204)
    world.store.flush()
    today = datetime.now(UTC).date().isoformat()
    body = await world.call("GET", f"/audit?event_type=checkpoints&day={today}", 200)
    events = [entry["event"] for entry in body["entries"]]
    assert events == ["checkpoint_saved", "checkpoint_published", "checkpoint_deleted"]
    assert body["entries"][0]["tinker_path"] == "tinker://s:train:0/weights/first"
    other_day = await world.call("GET", "/audit?event_type=all&day=2020-02-02", 200)
    assert other_day["entries"] == []
    assert (await world.call("GET", "/audit", 200, key="tml-bob"))["entries"] == []


async def test_a_trace_is_made_of_journal_timings(world: World) -> None:
    now = time.time()
    world.store.journal.append(rows.op(1, accepted_at=now - 3)).result(timeout=60)
    world.store.journal.append(rows.op(2, accepted_at=now - 2)).result(timeout=60)
    world.store.journal.note([rows.ended(1, started_at=now - 1)]).result(timeout=60)
    for path in ("/sessions/s/trace_export", "/training_runs/s:train:0/trace_export"):
        body = await world.call("GET", path, 200)
        assert body["status"] == "ready"
        slices = perfetto_slices((await world.http.get(body["url"])).content)
        [run] = slices["s:train:0", "requests"]
        assert run.name == "forward_backward"
        assert run.began_at == pytest.approx(now - 1)
        assert 1 <= run.ended_at - run.began_at <= time.time() - now + 1  # ended by `note`
        assert run.details["waited_ms"] == pytest.approx(2000, rel=0.01)
        waits, accepted = slices["s:train:0", "requests wait"]
        assert waits.ended_at - waits.began_at == pytest.approx(2, rel=0.01)
        assert accepted.name == "forward_backward accepted"


async def test_usage_shows_every_kind_of_token(world: World) -> None:
    hour = time.time() // 3600 * 3600
    kinds = {
        "training": {"type": "training", "token_count": 7},
        "sampling_prefill": {"type": "sampling_prefill", "cached": False, "token_count": 7},
        "sampling_prefill_cached": {"type": "sampling_prefill", "cached": True, "token_count": 7},
        "sampling_sample": {"type": "sampling_sample", "token_count": 7},
    }
    world.store.usage.add(
        UsageCount(kind=kind, count=7, user_id="ann", session_id="s", base_model="toy")  # type: ignore[arg-type]
        for kind in kinds
    )
    window = f"starting_on={_rfc(hour)}&ending_before={_rfc(hour + 7200)}"
    body = await world.call("GET", f"/billing/usage/events?{window}", 200)
    infos = {str(info) for info in kinds.values()}
    assert {str(event["event_info"]) for event in body["data"]} == infos
    assert body["data"][0]["bucket_start"] in (_rfc(hour), _rfc(hour + 3600))  # the hour may end
    assert body["sessions"] == {"s": {"user_metadata": {"team": "red"}}}
    other = await world.call("GET", f"/billing/usage/events?{window}", 200, key="tml-bob")
    assert other["data"] == []


@pytest.mark.parametrize(
    "window",
    [
        "starting_on=2026-01-01T00:30:00Z&ending_before=2026-01-01T02:00:00Z",
        "starting_on=2026-01-01T00:00:00Z&ending_before=2026-02-01T00:00:00Z",
        "starting_on=2026-01-02T00:00:00Z&ending_before=2026-01-01T00:00:00Z",
        "starting_on=2026-01-01T00:00:00&ending_before=2026-01-01T02:00:00",
        "starting_on=yesterday&ending_before=today",
        "",
    ],
)
async def test_a_wrong_window_of_usage_is_refused(world: World, window: str) -> None:
    await world.call("GET", f"/billing/usage/events?{window}", 400)


async def test_current_storage_is_summed_per_project(world: World) -> None:
    await world.save("a", project_id="p")
    await world.save("b")
    body = await world.call("GET", "/billing/usage/checkpoints/current?project_id=p", 200)
    (row,) = body["data"]
    assert (row["checkpoint_count"], row["size_bytes"]) == (1, 10242)
    both = await world.call("GET", "/billing/usage/checkpoints/current", 200)
    assert len(both["data"]) == 2


def _rfc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_an_unnamed_snapshot_goes_with_its_session(world: World) -> None:
    """It stays while the session lives, an hour after its end, and two weeks after its silence."""
    folder = world.shelf.new_ephemeral_folder("s:sample:0")
    folder.mkdir()
    world.store.sampling.create(
        rows.sampling(folder=world.shelf.folders.name(folder), ephemeral=True)
    )
    sweeper = Sweeper(world.store, world.shelf, ServerConfig())
    await sweeper.sweep(time.time() + 13 * 24 * 3600)
    assert folder.exists()
    done = {"reason": {"type": "success"}, "detail": None}
    await world.call("POST", "/sessions/s/finish", 204, json=done)
    await sweeper.sweep(time.time() + 3000)
    assert folder.exists()
    await sweeper.sweep(time.time() + 4000)
    assert not folder.exists()
    found = world.store.sampling.get("s:sample:0")
    assert found is not None
    assert found.folder is None


async def test_an_unnamed_snapshot_of_a_silent_session_goes_after_two_weeks(world: World) -> None:
    folder = world.shelf.new_ephemeral_folder("s:sample:0")
    folder.mkdir()
    world.store.sampling.create(
        rows.sampling(folder=world.shelf.folders.name(folder), ephemeral=True)
    )
    await Sweeper(world.store, world.shelf, ServerConfig()).sweep(time.time() + 15 * 24 * 3600)
    assert not folder.exists()
