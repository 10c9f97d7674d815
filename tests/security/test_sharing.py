"""What was shared once is not shared for ever: links, queued loads and samplers name a version."""

from __future__ import annotations

import httpx
import pytest
from app_world import AppWorld, open_app
from wire_client import train_body

ANN, BOB = "tml-ann", "tml-bob"
BODY = {"tags": [], "sdk_version": "test"}


async def _save(world: AppWorld, name: str, *, kind: str = "save_weights") -> tuple[str, str]:
    """A run of Ann's and a checkpoint of it."""
    model = await world.model(key=ANN)
    body = {"model_id": model, "path": name, "seq_id": 1}
    return model, (await world.result(await world.ok(kind, body, key=ANN), key=ANN))["path"]


async def _publish(world: AppWorld, path: str, *, method: str = "POST") -> None:
    run, kind, name = path.removeprefix("tinker://").split("/")
    url = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish"
    answer = await world.http.request(method, url, headers={"x-api-key": ANN})
    assert answer.status_code == 204, answer.text


async def _overwrite(world: AppWorld, model: str, path: str, *, kind: str = "save_weights") -> None:
    """New private weights under the old name, as `overwrite` does it."""
    shelf, store = world.service.shelf, world.service.store
    old = await store.call(store.checkpoints.get, path)
    assert old is not None
    from dataclasses import replace

    from tinkex.server.files.checkpoints import parse_path

    copy = shelf.new_folder(parse_path(path))
    copy.mkdir()
    for file in (await shelf.at_hand(old.folder)).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    await shelf.register(replace(old, folder=shelf.folders.name(copy), public=False))


async def _archive(world: AppWorld, path: str, key: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    url = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    headers = {"x-api-key": key, "accept": "application/json"}
    answer = await world.http.get(url, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["url"])


async def _get(world: AppWorld, url: str) -> httpx.Response:
    return await world.http.get(url)


async def test_a_link_to_what_was_public_ends_when_it_is_not(two_keys: AppWorld) -> None:
    _, path = await _save(two_keys, "shared")
    await _publish(two_keys, path)
    url = await _archive(two_keys, path, BOB)
    assert (await _get(two_keys, url)).status_code == 200
    await _publish(two_keys, path, method="DELETE")
    assert (await _get(two_keys, url)).status_code == 404


async def test_a_link_never_opens_a_later_version(two_keys: AppWorld) -> None:
    model, path = await _save(two_keys, "shared")
    await _publish(two_keys, path)
    url = await _archive(two_keys, path, BOB)
    await _overwrite(two_keys, model, path)
    await _publish(two_keys, path)
    answer = await _get(two_keys, url)
    assert answer.status_code == 404
    assert "replaced" in answer.text


async def test_a_link_ends_with_the_key_it_was_made_with(two_keys: AppWorld) -> None:
    accounts = two_keys.service.store.accounts
    accounts.ensure_user("ann")
    spare = accounts.add_key("tml-spare", "ann")
    _, path = await _save(two_keys, "own")
    url = await _archive(two_keys, path, "tml-spare")
    assert (await _get(two_keys, url)).status_code == 200
    accounts.revoke_key(spare.key_id)
    assert (await _get(two_keys, url)).status_code == 403


async def test_a_queued_load_is_judged_when_its_turn_comes(two_keys: AppWorld) -> None:
    model, path = await _save(two_keys, "shared")
    await _publish(two_keys, path)
    mine = await two_keys.model(key=BOB)
    load = {"model_id": mine, "path": path, "seq_id": 2, "optimizer": False}
    promise = await two_keys.ok("load_weights", load, key=BOB)  # waits for number 1
    await _overwrite(two_keys, model, path)
    first = train_body(mine, 1, [1, 2])
    headers = {"content-type": "application/x-protobuf"}
    await two_keys.ok("forward_backward", first, key=BOB, headers=headers)
    answer = await two_keys.result(promise, key=BOB)
    assert "no longer shared" in answer["error"]


async def test_the_owners_own_queued_load_takes_what_was_saved_before_it(
    two_keys: AppWorld,
) -> None:
    model, path = await _save(two_keys, "mine")
    load = {"model_id": model, "path": path, "seq_id": 3, "optimizer": False}
    promise = await two_keys.ok("load_weights", load, key=ANN)
    await _overwrite(two_keys, model, path)
    headers = {"content-type": "application/x-protobuf"}
    await two_keys.ok("forward_backward", train_body(model, 2, [1]), key=ANN, headers=headers)
    assert "error" not in await two_keys.result(promise, key=ANN)


async def test_a_sampler_of_what_was_public_ends_when_it_is_not(
    two_keys: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.work.sampling_sessions.ACCESS_S", 0.0)
    _, path = await _save(two_keys, "shared", kind="save_weights_for_sampler")
    await _publish(two_keys, path)
    session = await two_keys.session(key=BOB)
    asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    made = await two_keys.ok("create_sampling_session", asked, key=BOB)
    sample = {
        "sampling_session_id": made["sampling_session_id"],
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 2},
        "num_samples": 1,
    }
    promise = await two_keys.ok("asample", sample | {"seq_id": 1}, key=BOB)
    assert isinstance(await two_keys.result(promise, key=BOB), bytes)
    await _publish(two_keys, path, method="DELETE")
    answer = await two_keys.post("asample", sample | {"seq_id": 2}, key=BOB)
    assert answer.status_code == 410, answer.text


async def test_nobodys_key_left_does_not_open_the_server(tmp_path) -> None:  # type: ignore[no-untyped-def]
    async with open_app(tmp_path) as world:
        assert (await world.post("create_session", BODY, key="")).status_code == 200
        accounts = world.service.store.accounts
        accounts.ensure_user("ann")
        accounts.revoke_key(accounts.add_key("tml-ann", "ann").key_id)
    async with open_app(tmp_path) as world:
        assert (await world.post("create_session", BODY, key="")).status_code == 401
