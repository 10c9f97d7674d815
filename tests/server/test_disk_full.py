"""A full disk costs a pause or a clear error: nothing accepted is lost, nothing partial lists."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from app_world import AppWorld, open_app
from server_process import ServerProcess
from small_disk import Disk, small_disk
from wire_client import PROTO, Failed, WireClient, loss_of, save_body, train_body

from tinkex.server.process.disk import RESERVE_BYTES, RESERVES

KEPT_BYTES = 400_000
"""Left on the disk by tests of saves: enough for the journal, too little for a checkpoint."""
NUM_STEPS = 12


class World:
    def __init__(self, server: ServerProcess, disk: Disk) -> None:
        self.server = server
        self.disk = disk
        self.client = WireClient(server.base_url)

    def post_train(self, model: str, seq_id: int, tokens: list[int]) -> Any:
        body = train_body(model, seq_id, tokens)
        return self.client.post("forward_backward", body, headers=PROTO)

    def checkpoints(self) -> list[str]:
        found = self.client.http.get("/api/v1/checkpoints").json()["checkpoints"]
        return sorted(item["tinker_path"].rpartition("/")[2] for item in found)

    def files(self, pattern: str) -> list[str]:
        root = self.server.folder / "data"
        return sorted(str(path.relative_to(root)) for path in root.glob(pattern))

    def files_in_the_end(self, pattern: str, expected: list[str]) -> list[str]:
        """What a failed save left is removed just after the failure is told."""
        until = time.monotonic() + 60
        while (found := self.files(pattern)) != expected and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def load(self, path: str) -> str:
        """A new model from a checkpoint."""
        body = {"session_id": self.client.session(), "model_seq_id": 0, "path": path}
        made = self.client.ok("load_weights", body | {"optimizer": "/weights/" in path})
        return str(self.client.result(made)["model_id"])


@contextmanager
def open_world(folder: Path, *flags: str, min_free_bytes: int = 0) -> Iterator[World]:
    settings = folder / "settings.toml"
    settings.write_text(f"min_free_bytes = {min_free_bytes}\nhold_s = 1.0\n")
    engine = () if "--engine" in flags else ("--engine", "toy")
    flags = (*engine, "--deterministic", "--config", str(settings), *flags)
    server = ServerProcess(folder, *flags)
    with small_disk(folder / "data", lambda: [server.pid, *server.worker_pids()]) as disk:
        with server:
            world = World(server, disk)
            yield world
            world.client.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_world(tmp_path) as world:
        yield world


def needs_mount(world: World) -> None:
    if not world.disk.is_real:
        pytest.skip("RLIMIT_FSIZE cannot imitate this; run as root")


def tokens_of(number: int) -> list[int]:
    """Far apart, so that the toy's adapter and the journal grow by something."""
    return [(number * 997 + i * 31) % 30_000 for i in range(3000)]


def big_model(world: World, num_steps: int = 8) -> tuple[str, int]:
    """A model whose checkpoints need much more than `KEPT_BYTES`, and its next number."""
    model = world.client.model(world.client.session())
    for number in range(1, 2 * num_steps, 2):
        world.client.train(model, number, tokens_of(number))
        world.client.result(world.client.step(model, number + 1))
    return model, 2 * num_steps + 1


# ------------------------------------------------------------------------------------ saves


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
def test_a_save_without_room_fails_clearly_and_leaves_nothing(world: World, kind: str) -> None:
    client, (model, number) = world.client, big_model(world)
    before = client.result(client.save(model, number, "before"))["path"]
    size = sum(f.stat().st_size for f in (world.server.folder / "data/checkpoints").rglob("*.npz"))
    assert size > 1.5 * KEPT_BYTES, "the checkpoint must not fit into what is left"
    files = world.files("checkpoints/*/*/*")
    world.disk.fill(leave_bytes=KEPT_BYTES)
    body = {"model_id": model, "seq_id": number + 1, "path": "after"}
    with pytest.raises(Failed, match=r"disk .* takes no more \(.*\)\. Free space") as failed:
        client.result(client.ok(kind, body))
    assert failed.value.category == "server"
    assert world.checkpoints() == ["before"]
    left = world.files_in_the_end("checkpoints/*/weights/*", files)
    assert left == files, "what was written aside is gone too"
    assert not world.files_in_the_end("checkpoints/*/sampler_weights/*", [])
    probe = tokens_of(1)[:16]  # a small request, for which the journal still has room
    # What was there before still loads, and the model trains on, all without room for a snapshot.
    other = world.load(before)
    first = loss_of(client.result(client.train(model, number + 2, probe)))
    assert loss_of(client.result(client.train(other, 1, probe))) == first
    world.disk.clear()
    again = client.result(client.ok(kind, body | {"seq_id": number + 3}))
    assert again["path"].endswith("/after")
    assert world.checkpoints() == ["after", "before"]
    assert loss_of(client.result(client.train(world.load(again["path"]), 1, probe))) == first


def test_a_real_engine_leaves_nothing_partial_either(tmp_path: Path, tiny_model: Path) -> None:
    flags = ("--engine", "torch", "--device", "cpu", "--model", str(tiny_model))
    with open_world(tmp_path, *flags, "--alias", f"toy={tiny_model}") as world:
        client, tokens = world.client, [5, 9, 17, 33]
        model = client.model(client.session(), rank=64)
        client.train(model, 1, tokens)
        client.result(client.step(model, 2))
        before = client.result(client.save(model, 3, "before"))["path"]
        (folder,) = world.files("checkpoints/*/weights/*")
        weights = (world.server.folder / "data" / folder / "adapter_model.safetensors").stat()
        assert weights.st_size > KEPT_BYTES, "the checkpoint must not fit into what is left"
        world.disk.fill(leave_bytes=KEPT_BYTES)
        with pytest.raises(Failed, match="takes no more"):
            client.result(client.save(model, 4, "after"))
        assert world.checkpoints() == ["before"]
        assert world.files_in_the_end("checkpoints/*/weights/*", [folder]) == [folder]
        loss = loss_of(client.result(client.train(model, 5, tokens)))
        assert loss_of(client.result(client.train(world.load(before), 1, tokens))) == loss
        world.disk.clear()
        client.result(client.save(model, 6, "after"))
        assert world.checkpoints() == ["after", "before"]


def test_an_unnamed_sampler_without_room_is_not_made(world: World) -> None:
    client, (model, number) = world.client, big_model(world)
    world.disk.fill(leave_bytes=KEPT_BYTES)
    body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": 0}
    with pytest.raises(Failed, match="takes no more"):
        client.result(client.ok("save_weights_for_sampler", body))
    assert not world.files_in_the_end("ephemeral/*", [])
    world.disk.clear()
    body |= {"seq_id": number + 1, "sampling_session_seq_id": 1}
    made = client.result(client.ok("save_weights_for_sampler", body))
    assert sample(world, made["sampling_session_id"], 0).status_code == 200


def test_a_copy_without_room_is_refused_and_leaves_nothing(world: World) -> None:
    needs_mount(world)
    client, (model, number) = world.client, big_model(world)
    path = client.result(client.save(model, number, "original"))["path"]
    world.disk.fill(leave_bytes=KEPT_BYTES)
    files = world.files("checkpoints/*/*/*")
    refused = client.post("copy_weights", {"source_path": path})
    assert refused.status_code == 507, refused.text
    assert world.checkpoints() == ["original"]
    assert world.files("checkpoints/*/*/*") == files
    world.disk.clear()
    copy = client.ok("copy_weights", {"source_path": path})["tinker_path"]
    assert world.load(copy)


# ------------------------------------------------------------------------------------ training


def train(world: World, model: str, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last, 2):
        promise = world.client.train(model, number, tokens_of(number))
        step = world.client.step(model, number + 1)
        losses.append(loss_of(world.client.result(promise)))
        world.client.result(step)
    return losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that had all the room it wanted."""
    with open_world(tmp_path_factory.mktemp("calm")) as world:
        return train(world, world.client.model(world.client.session()), 1, 2 * NUM_STEPS + 1)


def until_full(world: World, model: str, number: int) -> tuple[list[Any], Any]:
    """Send passes until one is refused: the promises so far, and the refusal."""
    promises = []
    while (answer := world.post_train(model, number, tokens_of(number))).status_code == 200:
        promises.append(answer.json())
        assert len(promises) < 2000, "the disk never became full"
        number += 1
    return promises, answer


def test_a_pass_without_room_is_refused_and_the_same_session_goes_on(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    with open_world(tmp_path, "--snapshot-every", "5") as world:
        model = world.client.model(world.client.session())
        losses = train(world, model, 1, 7)
        world.disk.fill()
        assert world.client.http.get("/api/v1/healthz").status_code == 200
        refused = world.post_train(model, 7, tokens_of(7))
        assert refused.status_code == 507, refused.text
        assert refused.json()["code"] == "disk_full"
        assert "Free space" in refused.json()["detail"]
        assert "INSERT" not in refused.text, "no SQL, no data"
        assert refused.headers["retry-after"]
        assert world.post_train(model, 7, tokens_of(7)).status_code == 507, "and again"
        world.disk.clear()
        losses += train(world, model, 7, 13)
        world.server.kill_worker()
        losses += train(world, model, 13, 19)
        world.server.kill()
        world.server.start()
        losses += train(world, model, 19, 2 * NUM_STEPS + 1)
        assert losses == undisturbed


def test_ends_that_found_no_room_are_not_forgotten_when_the_worker_dies(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    """The journal must know what ran before anything is replayed, however long that takes."""
    with open_world(tmp_path, "--engine", "toy:latency_s=0.3") as world:
        client = world.client
        model = client.model(client.session())
        promises = [client.train(model, 1, tokens_of(1)), client.step(model, 2)]
        promises.append(client.train(model, 3, tokens_of(3)))
        world.disk.fill()
        results = [client.result(promise) for promise in promises]
        world.server.kill_worker()
        time.sleep(1)
        waiting = world.client.post("optim_step", {"model_id": model, "seq_id": 4})
        assert waiting.status_code in (200, 507), waiting.text
        world.disk.clear()
        client.result(client.step(model, 4))
        losses = [loss_of(results[0]), loss_of(results[2])]
        assert losses + train(world, model, 5, 2 * NUM_STEPS + 1) == undisturbed
        assert "replaying" in world.server.log


def test_everything_accepted_before_the_disk_was_full_is_answered(world: World) -> None:
    model = world.client.model(world.client.session())
    world.disk.fill(leave_bytes=2_000_000)
    promises, refused = until_full(world, model, 1)
    assert refused.status_code == 507
    losses = [loss_of(world.client.result(promise)) for promise in promises]
    assert len(losses) > 10
    world.disk.clear()
    number = len(promises) + 1
    world.client.result(world.client.train(model, number, tokens_of(number)))
    world.server.kill()
    world.server.start()
    done = world.client.result(world.client.step(model, number + 1))
    assert done["metrics"]["step:max"] == 1.0


def test_new_work_is_refused_while_there_is_still_room_to_end_the_old(tmp_path: Path) -> None:
    with open_world(tmp_path, min_free_bytes=3_000_000) as world:
        needs_mount(world)
        model = world.client.model(world.client.session())
        world.disk.fill(leave_bytes=2_000_000)
        time.sleep(0.6)
        refused = world.post_train(model, 1, tokens_of(1))
        assert refused.status_code == 507
        assert "nearly full: 2.0 MB free, and 3.0 MB are kept" in refused.json()["detail"]
        assert str(tmp_path) not in refused.json()["detail"]
        world.disk.clear()
        time.sleep(0.6)
        world.client.result(world.client.train(model, 1, tokens_of(1)))
        assert "new work is refused" in world.server.log
        assert "has room again" in world.server.log


# ------------------------------------------------------------------------------------ the rest


def sample(world: World, sampling_session: str, seq_id: int) -> Any:
    body = {
        "sampling_session_id": sampling_session,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4},
    }
    answer = world.client.post("asample", body)
    if answer.status_code != 200:
        return answer
    return world.client.wait(answer.json()["request_id"])


def test_samples_on_a_full_disk_are_refused_or_answered_never_left_waiting(world: World) -> None:
    body = {"session_id": world.client.session(), "sampling_session_seq_id": 0}
    made = world.client.ok("create_sampling_session", body | {"base_model": "toy"})
    session = made["sampling_session_id"]
    assert sample(world, session, 0).status_code == 200
    world.disk.fill()
    statuses = [sample(world, session, number).status_code for number in range(1, 200)]
    assert set(statuses) <= {200, 507}
    assert 507 in statuses, "the ledger of samples had room for two hundred lines"
    world.disk.clear()
    assert [sample(world, session, number).status_code for number in range(1, 200)] == [200] * 199
    world.server.kill()
    world.server.start()
    assert sample(world, session, 200).status_code == 200


def test_a_server_starts_on_a_full_disk_or_says_why_not(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        needs_mount(world)
        model, number = big_model(world)
        world.client.result(world.client.save(model, number, "kept"))
        world.server.stop()
        world.disk.fill()
        world.server.start(wait=False)
        try:
            world.server.wait_started()
        except AssertionError:
            assert "takes no more" in world.server.log
            assert "Traceback" not in world.server.log
            world.server.stop()
            world.disk.clear()
            world.server.start()
        assert world.checkpoints() == ["kept"]
        world.disk.clear()
        world.client.result(world.client.train(model, number + 1, tokens_of(1)))


# ------------------------------------------------------------------------------------ reserve


ANN, EVE, ROOT = ({"x-api-key": f"tml-{name}"} for name in ("ann", "eve", "root"))


@asynccontextmanager
async def full_world(folder: Path) -> AsyncIterator[tuple[AppWorld, Disk]]:
    """An app on a small disk, with a user Eve and an administrator; the test fills it."""
    with small_disk(folder, list) as disk:
        if not disk.is_real:
            pytest.skip("RLIMIT_FSIZE cannot imitate this; run as root")
        keys = ("tml-ann=ann", "tml-eve=eve")
        async with open_app(folder, api_keys=keys, min_free_bytes=5_000_000) as world:
            accounts, call = world.service.store.accounts, world.service.store.call
            await call(accounts.ensure_user, "root")
            await call(accounts.add_key, "tml-root", "root", role="admin")
            yield world, disk


async def emptied(world: AppWorld, way: str, model: str) -> int:
    """The status of a call that frees something, or lets an administrator do so."""
    users, run = "/tinkex/v1/admin/users/ann", f"/tinkex/v1/runs/{model}"
    http = world.http
    if way == "delete":
        path = f"/api/v1/training_runs/{model}/checkpoints/weights/one"
        return (await http.delete(path, headers=ANN)).status_code
    if way == "delete_run":
        return (await http.delete(run, headers=ANN)).status_code
    if way == "console":
        page = (await http.get(f"/console/runs/{model}", headers=ANN)).text
        token = page.partition('name="form-token" content="')[2].partition('"')[0]
        form = {"path": f"tinker://{model}/weights/one", "action": "delete"}
        form |= {"confirmed": "yes", "form_token": token}
        return (await http.post("/console/checkpoints", data=form, headers=ANN)).status_code
    if way == "disable":
        return (await http.post(f"{users}/disable", json={}, headers=ROOT)).status_code
    body = {"quotas": {"models": 3}}
    return (await http.put(f"{users}/quotas", json=body, headers=ROOT)).status_code


@pytest.mark.parametrize("way", ["delete", "delete_run", "console", "disable", "quotas"])
async def test_a_full_disk_is_emptied_through_the_server(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "data"
    async with full_world(folder) as (world, disk):
        model = await world.model(key="tml-ann")
        saving = await world.ok("save_weights", save_body(model, 1, "one"), key="tml-ann")
        await world.result(saving, key="tml-ann")
        world.service.store.models.touch(model, 1.0)  # it was silent for long
        await world.service.store.call(world.service.store.flush)
        for name in RESERVES:
            assert (folder / name).stat().st_size == RESERVE_BYTES
            assert (folder / name).stat().st_mode & 0o077 == 0
        disk.fill()
        world.service.room._looked_at = -10.0
        refused = await world.post("create_session", key="tml-ann")
        assert refused.status_code == 507
        assert str(tmp_path) not in refused.text
        assert await emptied(world, way, model) in (200, 204, 303)
        is_deleted = way in ("delete", "delete_run", "console")
        assert bool(list((folder / "checkpoints").glob("*/*/*"))) != is_deleted
        assert [(folder / name).exists() for name in RESERVES] == [False, True]
        disk.clear()
        world.service.room.keep_reserves()
        assert (folder / RESERVES[0]).exists(), "it is made again where there is room"


async def test_nobody_takes_the_administrators_way_to_empty_a_disk(tmp_path: Path) -> None:
    """One who has nothing to delete asks to, and fills what was made free."""
    folder = tmp_path / "data"
    async with full_world(folder) as (world, disk):
        model = await world.model(key="tml-eve")
        disk.fill()
        world.service.room._looked_at = -10.0
        users = "/tinkex/v1/admin/users"
        assert (await world.http.get(users, headers=EVE)).status_code == 403
        assert (await world.http.post(f"{users}/ann/disable", headers=EVE)).status_code == 403
        assert (await world.http.get(users, headers=ROOT)).status_code == 200
        assert all((folder / name).exists() for name in RESERVES), "nothing was to be freed"
        for _ in range(2):
            absent = "/api/v1/training_runs/none/checkpoints/weights/none"
            assert (await world.http.delete(absent, headers=EVE)).status_code == 404
            told = {"settings": {"x": "y" * 3000}}
            kept = await world.http.put(f"/tinkex/v1/runs/{model}", json=told, headers=EVE)
            assert kept.status_code == 507, "descriptions are kept, too"
            disk.fill()
        assert [(folder / name).exists() for name in RESERVES] == [False, True]
        assert await emptied(world, "disable", model) == 200
        assert not any((folder / name).exists() for name in RESERVES)
