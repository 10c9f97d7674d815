"""`POST /checkpoints/search` of SDK 0.39: every condition, pages, and nobody else's checkpoints."""

from __future__ import annotations

import time
from typing import Any

import pytest
import store_rows as rows
from rest_world import World

from tinkex.server.rest import search
from tinkex.types.account.checkpoints import TinkerPath


async def found(world: World, key: str = "tml-ann", **conditions: Any) -> list[str]:
    body = await world.call("POST", "/checkpoints/search", 200, key=key, json=conditions)
    return [checkpoint["checkpoint_id"] for checkpoint in body["checkpoints"]]


async def test_a_search_finds_by_every_condition_newest_first(world: World) -> None:
    await world.save("a", created_at=1000.0, project_id="p", user_metadata={"k": "1", "l": "2"})
    await world.save("b", "sampler_weights", created_at=1001.0, base_model="other")
    await world.save("c", "external_weights", created_at=1002.0, user_metadata={"k": "1"})
    everything = ["external_weights/c", "sampler_weights/b", "weights/a"]
    assert await found(world) == everything
    assert await found(world, owner={"type": "accessible"}) == everything
    assert await found(world, project_ids=["p"]) == ["weights/a"]
    assert await found(world, user_metadata={"k": "1"}) == ["external_weights/c", "weights/a"]
    assert await found(world, user_metadata={"k": "1", "l": "2"}) == ["weights/a"]
    assert await found(world, checkpoint_type="sampler") == ["sampler_weights/b"]
    assert await found(world, checkpoint_type="external") == ["external_weights/c"]
    assert await found(world, base_models=["other", "third"]) == ["sampler_weights/b"]
    assert await found(world, base_models=[]) == []
    assert await found(world, base_models=["toy"], user_metadata={"l": "2"}) == ["weights/a"]


async def test_a_checkpoint_tells_its_base_model(world: World) -> None:
    await world.save("a", base_model="other")
    body = await world.call("POST", "/checkpoints/search", 200, json={})
    assert body["checkpoints"][0]["base_model"] == "other"
    listed = await world.call("GET", "/checkpoints", 200)
    assert listed["checkpoints"][0]["base_model"] == "other"


async def test_a_search_shows_nobody_elses_checkpoints_and_not_whether_there_are_any(
    world: World,
) -> None:
    """A public checkpoint can be read by its path; that makes it nobody's search result."""
    await world.save("mine", project_id="p")
    await world.save("shared", public=True)
    for owner in (
        {"type": "own"},
        {"type": "accessible"},
        {"type": "user", "owner_urns": ["tml:user:ann"]},
    ):
        assert await found(world, key="tml-bob", owner=owner) == []
    theirs = await world.call(
        "POST", "/checkpoints/search", 404, key="tml-bob", json={"project_ids": ["p"]}
    )
    absent = await world.call(
        "POST", "/checkpoints/search", 404, key="tml-bob", json={"project_ids": ["q"]}
    )
    assert theirs["detail"].replace("'p'", "'q'") == absent["detail"]
    both = {"type": "user", "owner_urns": ["tml:user:bob", "tml:user:ann"]}
    assert await found(world, owner=both) == ["weights/shared", "weights/mine"]


async def test_a_project_with_sessions_and_no_checkpoints_is_empty_and_not_absent(
    world: World,
) -> None:
    world.store.sessions.create(rows.session("t", project_id="fresh"))
    assert await found(world, project_ids=["fresh"]) == []


async def test_a_cursor_walks_through_all_checkpoints_once(world: World) -> None:
    """Several of one moment, and times finer than a cursor tells."""
    now = time.time()
    for n in range(11):
        await world.save(f"x{n:02}", created_at=now + n // 3 / 7)
    seen: list[str] = []
    cursor = None
    for _ in range(4):
        request = {"limit": 3, "cursor": cursor}
        body = await world.call("POST", "/checkpoints/search", 200, json=request)
        seen += [checkpoint["checkpoint_id"] for checkpoint in body["checkpoints"]]
        cursor = body.get("next_cursor")
    assert cursor is None
    assert seen == [f"weights/x{n:02}" for n in range(10, -1, -1)]


async def test_an_expired_checkpoint_is_not_found(world: World) -> None:
    await world.save("old", expires_at=time.time() - 1)
    assert await found(world) == []


async def test_a_search_for_rare_metadata_is_bounded_and_goes_on_by_its_cursor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SCAN_PAGE", 2)
    monkeypatch.setattr(search, "MAX_SCANNED", 4)
    for n in range(6):
        await world.save(f"c{n}", created_at=1000.0 + n, user_metadata={"n": str(n)})
    request: dict[str, Any] = {"user_metadata": {"n": "1"}}
    first = await world.call("POST", "/checkpoints/search", 200, json=request)
    assert first["checkpoints"] == []
    request["cursor"] = first["next_cursor"]
    second = await world.call("POST", "/checkpoints/search", 200, json=request)
    assert [c["checkpoint_id"] for c in second["checkpoints"]] == ["weights/c1"]
    assert second.get("next_cursor") is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"checkpoint_type": "weights"}, "checkpoint_type"),
        ({"user_metadata": {"k": 1}}, "user_metadata"),
        ({"owner": {"type": "everyone"}}, "owner"),
        ({"owner": {"type": "user", "owner_urns": []}}, "owner_urns"),
        ({"base_models": "toy"}, "base_models"),
        ({"cursor": {"last_created_at": "yesterday"}}, "cursor"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00Z"}}, "last_checkpoint_uuid"),
    ],
)
async def test_a_wrong_search_is_refused_by_the_name_of_its_field(
    world: World, wrong: dict[str, Any], said: str
) -> None:
    body = await world.call("POST", "/checkpoints/search", 400, json=wrong)
    assert said in body["detail"]


async def test_a_path_of_a_checkpoint_that_is_gone_still_goes_on(world: World) -> None:
    for n in range(3):
        await world.save(f"c{n}", created_at=1000.0 + n)
    first = await world.call("POST", "/checkpoints/search", 200, json={"limit": 1})
    path = TinkerPath("s:train:0", "weights", "c2")
    world.store.checkpoints.delete(str(path))
    request = {"limit": 5, "cursor": first["next_cursor"]}
    assert await found(world, **request) == ["weights/c1", "weights/c0"]
