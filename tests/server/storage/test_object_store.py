"""`--storage s3://...` against a real server of the S3 protocol."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from app_world import AppWorld, open_app
from moto_server import BUCKET, MotoServer

from tinkex.errors import ConfigError, EngineError
from tinkex.server.files import backup
from tinkex.server.files.object_store import Bucket


@asynccontextmanager
async def _open(folder: Path, prefix: str, **settings: object) -> AsyncIterator[AppWorld]:
    async with open_app(folder, storage=f"s3://{BUCKET}/{prefix}", **settings) as world:
        yield world


async def _save(world: AppWorld, name: str, kind: str = "save_weights") -> str:
    model = await world.model()
    await world.result((await world.train(model, 1, [1, 2, 3])).json())
    await world.result((await world.step(model, 2)).json())
    answer = await world.result(
        await world.ok(kind, {"model_id": model, "path": name, "seq_id": 3})
    )
    assert "path" in answer, answer
    return str(answer["path"])


async def _load(world: AppWorld, path: str) -> dict[str, object]:
    model = await world.model()
    body = {"model_id": model, "path": path, "seq_id": 1, "optimizer": True}
    answer: dict[str, object] = await world.result(await world.ok("load_weights", body))
    return answer


def _local(folder: Path) -> list[Path]:
    return sorted(f for f in (folder / "checkpoints").rglob("*") if f.is_file())


def _files(s3: MotoServer, prefix: str) -> dict[str, bytes]:
    return {k: v for k, v in s3.objects(prefix).items() if k.startswith("checkpoints/")}


async def _archive(world: AppWorld, path: str) -> dict[str, bytes]:
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    route = f"/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/archive"
    found = await world.http.get(route, headers={"accept": "application/json"})
    body = await world.http.get(found.json()["url"])
    assert body.status_code == 200, body.text
    with tarfile.open(fileobj=io.BytesIO(body.content)) as archive:
        members = {m.name: archive.extractfile(m) for m in archive}
        return {name: member.read() for name, member in members.items() if member is not None}


async def test_a_checkpoint_lies_in_the_bucket_byte_for_byte(
    s3: MotoServer, tmp_path: Path
) -> None:
    async with _open(tmp_path, "bytes") as world:
        await _save(world, "kept")
    on_disk = {f.relative_to(tmp_path).as_posix(): f.read_bytes() for f in _local(tmp_path)}
    in_bucket = {k: v for k, v in _files(s3, "bytes").items() if not k.endswith(".files")}
    assert on_disk == in_bucket
    assert on_disk


async def test_what_the_disk_lost_is_fetched_to_load_sample_download_and_copy(
    s3: MotoServer, tmp_path: Path
) -> None:
    async with _open(tmp_path, "fetch") as world:
        path = await _save(world, "kept")
        sampler = await _save(world, "sampler", "save_weights_for_sampler")
        whole = await _archive(world, path)
    for use in ("load", "sample", "download", "copy"):
        shutil.rmtree(tmp_path / "checkpoints")
        async with _open(tmp_path, "fetch") as world:
            if use == "load":
                assert "error" not in await _load(world, path)
            elif use == "sample":
                prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
                body = {"model_path": sampler, "prompt": prompt, "num_samples": 1}
                body["sampling_params"] = {"max_tokens": 4, "seed": 1}
                answer = await world.result(await world.ok("asample", body))
                assert isinstance(answer, bytes), answer  # protobuf; an error would be JSON
            elif use == "download":
                assert await _archive(world, path) == whole
            else:
                answer = await world.ok("copy_weights", {"source_path": path})
                assert await _archive(world, answer["tinker_path"]) == whole


async def test_only_what_the_database_says_was_deleted_leaves_the_bucket(
    s3: MotoServer, tmp_path: Path
) -> None:
    async with _open(tmp_path, "delete") as world:
        gone, kept = await _save(world, "gone"), await _save(world, "kept")
        shelf = world.parts.shelf
        run_id, kind, name = gone.removeprefix("tinker://").split("/")
        stray = Bucket(f"s3://{BUCKET}/delete")
        stray.put_folder("checkpoints/x/weights/unlisted-000000000000", _local(tmp_path)[0].parent)
        await world.http.delete(f"/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}")
        await shelf.set_strays_aside()
    left = _files(s3, "delete")
    assert not [key for key in left if "gone-" in key]
    assert [key for key in left if "kept-" in key]
    assert [key for key in left if "unlisted-" in key]
    async with _open(tmp_path, "delete") as world:
        await world.parts.shelf.set_strays_aside()
        assert "error" not in await _load(world, kept)
    assert _files(s3, "delete") == left


async def test_a_save_that_the_bucket_refuses_lists_nothing_and_can_be_repeated(
    s3: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, is_away = Bucket.put_folder, True

    def sometimes(self: Bucket, name: str, folder: Path) -> None:
        """All files arrive, the list does not, as when the connection breaks in between."""
        put(self, name, folder)
        if is_away:
            raise EngineError("The checkpoint could not be kept in the server's object store: x.")

    monkeypatch.setattr(Bucket, "put_folder", sometimes)
    async with _open(tmp_path, "refused") as world:
        model = await world.model()
        body = {"model_id": model, "path": "name", "seq_id": 1}
        answer = await world.result(await world.ok("save_weights", body))
        assert "object store" in answer["error"]
        assert (await world.http.get("/api/v1/checkpoints")).json()["checkpoints"] == []
        is_away = False
        answer = await world.result(await world.ok("save_weights", body | {"seq_id": 2}))
        assert answer["path"].endswith("/weights/name")
        await asyncio.gather(*world.parts.shelf._clearing)
    lists = [key for key in _files(s3, "refused") if key.endswith(".files")]
    assert len(lists) == 1


async def test_copies_that_nobody_uses_go_when_there_are_too_many(
    s3: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _open(tmp_path, "trim", storage_cache_bytes=1) as world:
        path = await _save(world, "kept")
        depot = world.parts.shelf.depot
        await depot.trim()
        assert _local(tmp_path), "it was used a moment ago"
        monkeypatch.setattr("tinkex.server.files.depot.IN_USE_S", -1.0)
        await depot.trim()
        assert not _local(tmp_path)
        monkeypatch.undo()
        for name, value in s3.env.items():
            monkeypatch.setenv(name, value)
        assert "error" not in await _load(world, path)


async def test_checkpoints_from_before_move_into_the_bucket(s3: MotoServer, tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        path = await _save(world, "old")
    async with _open(tmp_path, "moved") as world:
        await world.parts.shelf.set_strays_aside()
    shutil.rmtree(tmp_path / "checkpoints")
    async with _open(tmp_path, "moved") as world:
        assert "error" not in await _load(world, path)
    found = backup.check(tmp_path)
    assert found.ok


async def test_a_server_is_not_started_without_the_bucket_of_its_checkpoints(
    s3: MotoServer, tmp_path: Path
) -> None:
    async with _open(tmp_path, "own"):
        pass
    with pytest.raises(ConfigError, match="give --storage s3://tinkex-test/own"):
        async with open_app(tmp_path):
            pass
    with pytest.raises(ConfigError, match="are in s3://tinkex-test/own, not in"):
        async with _open(tmp_path, "other"):
            pass
    with pytest.raises(ConfigError, match="checkpoints of the database with the id"):
        async with _open(tmp_path / "another", "own"):
            pass


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://no-such-bucket/x", "there is no such bucket"),
        ("gs://bucket/x", "storage must be s3://BUCKET"),
        ("s3:///x", "storage must be s3://BUCKET"),
        ("s3://key:secret@bucket/x", "storage must be s3://BUCKET"),
    ],
)
async def test_a_wrong_storage_is_refused_at_the_start(
    s3: MotoServer, tmp_path: Path, url: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        async with open_app(tmp_path, storage=url):
            pass


async def test_a_bucket_nobody_serves_is_refused_at_the_start(
    s3: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="nobody listens at its address"):
        async with _open(tmp_path, "away"):
            pass


async def test_wrong_keys_are_refused_at_the_start(s3: MotoServer, tmp_path: Path) -> None:
    s3.demand_keys(after=0)
    try:
        with pytest.raises(ConfigError, match="does not know the access key"):
            async with _open(tmp_path, "keys"):
                pass
    finally:
        s3.demand_keys(after=10**9)
