"""Uploads of SDK 0.39: weights as `save_weights_external` writes them become a checkpoint."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pyrage
import pytest
from app_world import AppWorld, open_app
from patience import soon

from tinkex.server.files import uploads
from tinkex.server.files.sweeper import Sweeper
from tinkex.server.process.config import ServerConfig

KEYS = ("tml-ann=ann", "tml-bob=bob")
ANN, BOB = {"key": "tml-ann"}, {"key": "tml-bob"}
NAMES = {"adapter_config.json", "adapter_model.npz", "manifest.json"}
Files = dict[str, bytes]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    async with open_app(tmp_path, api_keys=KEYS) as made:
        yield made


async def _export(world: AppWorld, **options: Any) -> tuple[str, Files]:
    """An export of a run that was trained a step, and its files."""
    model = await world.model(**ANN)
    await world.result((await world.train(model, 1, [1, 2, 3, 4], **ANN)).json(), **ANN)
    await world.result((await world.step(model, 2, 0.1, **ANN)).json(), **ANN)
    body = {"model_id": model, "path": "out", "seq_id": 3, **options}
    path = (await world.result(await world.ok("save_weights_external", body, **ANN), **ANN))["path"]
    await world.service.ends.caught_up()  # else bytes of the run are counted while a test counts
    run, rest = str(path).removeprefix("tinker://").split("/", 1)
    route = f"/training_runs/{run}/checkpoints/{rest}/external_weights_urls"
    urls = (await world.call("GET", route, 200, **ANN))["urls"]
    return str(path), {name: (await world.http.get(url)).content for name, url in urls.items()}


async def _start(world: AppWorld, rank: int = 4, **changes: Any) -> dict[str, Any]:
    body = {"base_model": "toy", "lora_config": {"rank": rank}, **changes}
    return dict(await world.ok("external_weights_upload_start", body, **ANN))


async def _put(world: AppWorld, url: str, data: bytes) -> httpx.Response:
    return await world.http.put(url, content=data)


async def _put_all(world: AppWorld, started: dict[str, Any], files: Files) -> None:
    for name, url in started["urls"].items():
        answer = await _put(world, url, files[name])
        assert answer.status_code == 200, answer.text
        told = {"size_bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
        assert answer.json() == told


async def _finish(
    world: AppWorld, upload_id: str, status: int = 200, key: str = "tml-ann"
) -> dict[str, Any]:
    answer = await world.post("external_weights_upload_finish", {"upload_id": upload_id}, key=key)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


async def _logprobs(world: AppWorld, path: str) -> list[float]:
    asked = {
        "session_id": await world.session(**ANN),
        "sampling_session_seq_id": 0,
        "model_path": path,
    }
    sampler = (await world.ok("create_sampling_session", asked, **ANN))["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "temperature": 0.0, "stop": []},
    }
    promise = {"request_id": (await world.ok("asample", body, **ANN))["request_id"]}
    answer = await world.post("retrieve_future", promise, **ANN)
    while answer.status_code == 408:
        answer = await world.post("retrieve_future", promise, **ANN)
    return list(answer.json()["sequences"][0]["logprobs"])


def _left(world: AppWorld) -> list[Path]:
    root = world.parts.config.data_dir / "uploads"
    return sorted(root.rglob("*")) if root.exists() else []


async def test_an_export_that_is_uploaded_samples_and_trains_like_the_original(
    world: AppWorld,
) -> None:
    original, files = await _export(world)
    started = await _start(world, destination_project_id="alpha")
    assert set(started["urls"]) == NAMES
    await _put_all(world, started, files)
    path = (await _finish(world, started["upload_id"]))["tinker_path"]
    assert path.split("/")[3:] == ["external_weights", "uploaded"]
    assert await _logprobs(world, path) == await _logprobs(world, original)
    search = await world.ok("checkpoints/search", {"project_ids": ["alpha"]}, **ANN)
    [found] = search["checkpoints"]
    assert (found["tinker_path"], found["base_model"]) == (path, "toy")
    assert found["checkpoint_type"] == "external"
    session = await world.session(**ANN)
    load = {"session_id": session, "model_seq_id": 0, "path": path}
    loaded = await world.result(await world.ok("load_weights", load, **ANN), **ANN)
    assert loaded["model_id"].startswith(session)


async def test_a_finished_upload_leaves_no_files_and_its_repeat_tells_the_same_checkpoint(
    world: AppWorld,
) -> None:
    _, files = await _export(world)
    started = await _start(world)
    before = world.service.store.stored.total("ann")
    await _put_all(world, started, files)
    once, twice = await asyncio.gather(*[_finish(world, started["upload_id"]) for _ in range(2)])
    assert once == twice == await _finish(world, started["upload_id"])
    assert {path.name for path in _left(world) if path.is_file()} == {"upload.json"}
    path = once["tinker_path"]
    row = world.service.store.checkpoints.get(path)
    assert row is not None
    assert world.service.store.stored.total("ann") == before + row.size_bytes


async def test_an_upload_without_all_its_files_is_told_which_and_goes_on(world: AppWorld) -> None:
    _, files = await _export(world)
    started = await _start(world)
    assert (await _put(world, started["urls"]["manifest.json"], files["manifest.json"])).is_success
    said = (await _finish(world, started["upload_id"], 400))["detail"]
    assert "adapter_config.json, adapter_model.npz" in said
    for name in NAMES - {"manifest.json"}:
        assert (await _put(world, started["urls"][name], files[name])).is_success
    assert "tinker_path" in await _finish(world, started["upload_id"])


async def test_a_link_takes_one_file_once(world: AppWorld) -> None:
    _, files = await _export(world)
    started = await _start(world)
    await _put_all(world, started, files)
    again = await _put(world, started["urls"]["adapter_config.json"], b"{}")
    assert (again.status_code, again.json()["code"]) == (409, "already_uploaded")
    assert hashlib.sha256(files["adapter_config.json"]).hexdigest() in again.json()["detail"]
    path = (await _finish(world, started["upload_id"]))["tinker_path"]
    assert (await _put(world, started["urls"]["manifest.json"], b"{}")).status_code == 409
    assert await _logprobs(world, path)


async def test_a_link_of_an_upload_downloads_nothing_and_one_of_a_download_takes_nothing(
    world: AppWorld,
) -> None:
    _, files = await _export(world)
    started = await _start(world)
    [url, *_] = started["urls"].values()
    assert (await world.http.get(url.replace("/uploads/", "/signed/"))).status_code == 403
    run = (await world.call("GET", "/checkpoints", 200, **ANN))["checkpoints"][0]["tinker_path"]
    run, rest = run.removeprefix("tinker://").split("/", 1)
    route = f"/training_runs/{run}/checkpoints/{rest}/external_weights_urls"
    [down, *_] = (await world.call("GET", route, 200, **ANN))["urls"].values()
    assert (await _put(world, down.replace("/signed/", "/uploads/"), b"x")).status_code == 403
    assert (await _put(world, url[:-30] + "A" * 10 + url[-20:], b"x")).status_code == 403


async def test_the_key_is_judged_with_every_file_and_at_the_end(world: AppWorld) -> None:
    _, files = await _export(world)
    accounts = world.service.store.accounts
    await world.service.store.call(accounts.add_key, "tml-ann-2", "ann")
    body = {"base_model": "toy", "lora_config": {"rank": 4}}
    started = await world.ok("external_weights_upload_start", body, key="tml-ann-2")
    await _finish(world, started["upload_id"], 404, key="tml-bob")
    revoked = await world.http.delete("/api/v1/auth/apikey/me", headers={"x-api-key": "tml-ann-2"})
    assert revoked.is_success
    answer = await _put(world, started["urls"]["manifest.json"], files["manifest.json"])
    assert (answer.status_code, "revoked" in answer.json()["detail"]) == (403, True)
    assert not [path for path in _left(world) if path.name == "manifest.json"]
    await _finish(world, started["upload_id"], 401, key="tml-ann-2")


@pytest.mark.parametrize(
    ("lora", "change", "said"),
    [
        ({"rank": 8}, {}, "rank=8, and adapter_config.json has rank=4"),
        ({"rank": 4, "alpha": 16}, {}, "alpha=16.0, and adapter_config.json has alpha=32.0"),
        (
            {"rank": 4, "train_mlp": False},
            {"target_modules": ["q_proj", "up_proj"]},
            "train_mlp=False, and adapter_config.json has train_mlp=True",
        ),
        ({"rank": 4}, {"base_model_name_or_path": "other"}, "names 'other'"),
        ({"rank": 4}, {"r": "x"}, "a rank is a whole number"),
    ],
)
async def test_files_of_another_adapter_are_refused_and_leave_nothing(
    tmp_path: Path, lora: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    async with open_app(tmp_path, api_keys=KEYS, models=("toy", "other")) as world:
        _, files = await _export(world)
        config = json.loads(files["adapter_config.json"]) | change
        files["adapter_config.json"] = json.dumps(config).encode()
        started = await _start(world, lora_config=lora)
        await _put_all(world, started, files)
        told = (await _finish(world, started["upload_id"], 400))["detail"]
        assert said in told
        assert "start another" in told
        assert not [path for path in _left(world) if path.is_file()]
        await _finish(world, started["upload_id"], 404)
        assert (await world.call("GET", "/checkpoints", 200, **ANN))["cursor"]["total_count"] == 1


async def test_a_wrong_upload_that_is_finished_twice_at_once_keeps_no_room(world: AppWorld) -> None:
    _, files = await _export(world)
    started = await _start(world, rank=8)
    await _put_all(world, started, files)
    body = {"upload_id": started["upload_id"]}
    twice = [world.post("external_weights_upload_finish", body, **ANN) for _ in range(2)]
    answers = await asyncio.gather(*twice)
    assert sorted(answer.status_code for answer in answers) == [400, 404]
    stored = world.service.store.stored
    assert stored.total("ann") == stored.of("ann").total(), "nothing is reserved"


async def test_weights_that_the_engine_cannot_read_are_refused(world: AppWorld) -> None:
    _, files = await _export(world)
    files["adapter_model.npz"] = b"no weights"
    started = await _start(world)
    await _put_all(world, started, files)
    await _finish(world, started["upload_id"], 400)
    checkpoints = world.parts.config.data_dir / "checkpoints"
    assert not list(checkpoints.glob("*/external_weights/uploaded*"))


async def test_a_digest_that_a_manifest_claims_is_not_believed(world: AppWorld) -> None:
    original, files = await _export(world)
    manifest = json.loads(files["manifest.json"])
    true = manifest["content_sha256"]
    files["manifest.json"] = json.dumps(manifest | {"content_sha256": "0" * 64}).encode()
    started = await _start(world)
    await _put_all(world, started, files)
    path = (await _finish(world, started["upload_id"]))["tinker_path"]
    row = world.service.store.checkpoints.get(path)
    assert row is not None
    listed = json.loads((await world.parts.shelf.at_hand(row.folder) / "manifest.json").read_text())
    assert listed["content_sha256"] == true


async def test_unfinished_uploads_count_against_the_disk_of_their_user(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS, max_user_disk_bytes=1_000_000) as world:
        _, files = await _export(world)
        first, second = await _start(world), await _start(world)
        name, stored = "adapter_model.npz", world.service.store.stored
        before = stored.total("ann")
        assert (await _put(world, first["urls"][name], bytes(700_000))).is_success
        refused = await _put(world, second["urls"][name], bytes(700_000))
        assert (refused.status_code, refused.json()["code"]) == (400, "quota")
        assert not [path for path in _left(world) if path.suffix == ".part"]

        async def without_length() -> AsyncIterator[bytes]:
            for _ in range(7):
                yield bytes(100_000)

        refused = await world.http.put(second["urls"][name], content=without_length())
        assert refused.status_code == 400
        assert stored.total("ann") == before + 700_000
        assert (await _put(world, second["urls"][name], files[name])).is_success


async def test_a_file_beyond_the_limit_is_refused_and_can_be_sent_again(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS, max_upload_bytes=100_000) as world:
        _, files = await _export(world)
        started = await _start(world)
        url = started["urls"]["adapter_model.npz"]
        assert (await _put(world, url, bytes(100_001))).status_code == 413

        async def without_length() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield bytes(50_000)

        assert (await world.http.put(url, content=without_length())).status_code == 413
        assert not [path for path in _left(world) if path.suffix == ".part"]
        assert (await _put(world, url, files["adapter_model.npz"])).is_success


async def test_an_upload_that_becomes_a_checkpoint_counts_all_the_while(tmp_path: Path) -> None:
    """Else another upload would take its room in that moment, and both would be there."""
    async with open_app(tmp_path, api_keys=KEYS, max_user_disk_bytes=1_000_000) as world:
        _, files = await _export(world)
        started = await _start(world)
        await _put_all(world, started, files)
        stored, totals = world.service.store.stored, []
        before = stored.total("ann")

        async def watch() -> None:
            while True:
                totals.append(stored.total("ann"))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await _finish(world, started["upload_id"])
        watching.cancel()
        assert min(totals) == before
        assert max(totals) < before + 1000, "nor does it count twice"


async def test_an_upload_is_read_in_the_sandbox(world: AppWorld) -> None:
    """A header of 16 MB of JSON held everybody's requests for seconds where it was parsed."""
    _, files = await _export(world)
    started = await _start(world)
    await _put_all(world, started, files)
    finishing = asyncio.create_task(_finish(world, started["upload_id"], 400))
    sandbox = world.parts.sandbox
    await soon(lambda: sandbox._busy)
    (process,) = sandbox._busy
    os.kill(process.pid, signal.SIGKILL)
    assert "send less" in (await finishing)["detail"]
    assert not [path for path in _left(world) if path.is_file()]


async def test_an_upload_that_nobody_finishes_ends(world: AppWorld) -> None:
    _, files = await _export(world)
    started = await _start(world)
    await _put_all(world, started, files)
    parts = world.parts
    sweeper = Sweeper(parts.store, parts.shelf, ServerConfig())
    await sweeper.sweep(time.time() + 7000)
    assert _left(world)
    await sweeper.sweep(time.time() + 7300)
    assert not _left(world)
    await _finish(world, started["upload_id"], 404)


async def test_an_upload_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        _, files = await _export(world)
        started = await _start(world)
        late = files.pop("manifest.json")
        for name, data in files.items():
            assert (await _put(world, started["urls"][name], data)).is_success
        counted = world.service.store.stored.total("ann")
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert world.service.store.stored.total("ann") == counted
        assert (await _put(world, started["urls"]["manifest.json"], late)).is_success
        assert "tinker_path" in await _finish(world, started["upload_id"])


async def test_a_user_has_so_many_uploads_at_a_time(
    world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_OPEN", 2)
    for _ in range(2):
        await _start(world)
    body = {"base_model": "toy", "lora_config": {"rank": 4}}
    answer = await world.post("external_weights_upload_start", body, **ANN)
    assert (answer.status_code, answer.json()["code"]) == (429, "quota")
    assert (await world.post("external_weights_upload_start", body, **BOB)).status_code == 200


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"base_model": "nobody"}, "no base model 'nobody' is served here"),
        ({"base_model": "toy:peft:99999"}, "asks for a context of 99999 tokens"),
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"lora_config": {"rank": 8, "dora": True}}, "dora"),
        ({"lora_config": None}, "lora_config"),
        ({"destination_project_id": 5}, "destination_project_id"),
    ],
)
async def test_a_wrong_start_is_refused_and_starts_nothing(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    async with open_app(tmp_path, api_keys=KEYS, models=("toy",)) as world:
        await world.facts()
        body = {"base_model": "toy", "lora_config": {"rank": 4}} | wrong
        answer = await world.post("external_weights_upload_start", body, **ANN)
        assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text
        assert not _left(world)


async def test_a_file_with_an_encoding_is_refused(world: AppWorld) -> None:
    started = await _start(world)
    [url, *_] = started["urls"].values()
    answer = await world.http.put(url, content=b"x", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


async def test_an_export_for_age_recipients_is_refused_where_weights_are_needed(
    world: AppWorld,
) -> None:
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    path, _ = await _export(world, age_encryption_recipients=[recipient])
    session = await world.session(**ANN)
    load = {"session_id": session, "model_seq_id": 0, "path": path}
    answer = await world.post("load_weights", load, **ANN)
    assert (answer.status_code, "encrypted" in answer.text) == (400, True), answer.text
    asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    answer = await world.post("create_sampling_session", asked, **ANN)
    assert (answer.status_code, "encrypted" in answer.text) == (400, True)


@pytest.mark.timeout(600)
async def test_an_export_of_the_real_engine_is_two_files_and_comes_back_the_same(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Weights cut short are refused; the whole ones say the same to the bit."""
    settings = {"engine": "torch", "models": (str(tiny_model),), "deterministic": True}
    aliases = {"toy": str(tiny_model)}
    async with open_app(tmp_path, api_keys=KEYS, aliases=aliases, **settings) as world:
        original, files = await _export(world)
        weights = "adapter_model.safetensors"
        broken = await _start(world)
        assert set(broken["urls"]) == {"adapter_config.json", weights}
        await _put_all(world, broken, files | {weights: files[weights][:-100]})
        await _finish(world, broken["upload_id"], 400)
        started = await _start(world)
        await _put_all(world, started, files)
        path = (await _finish(world, started["upload_id"]))["tinker_path"]
        assert await _logprobs(world, path) == await _logprobs(world, original)
