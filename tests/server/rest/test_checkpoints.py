"""Checkpoints over HTTP: who sees them, how they end, how their files come out."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import pyrage
import pytest
import store_rows as rows
from rest_world import World

from tinkex.errors import InvalidInputError
from tinkex.server.files import checkpoints
from tinkex.server.files.encryption import check_recipients, encrypt_folder
from tinkex.server.files.sweeper import Sweeper
from tinkex.server.process.config import ServerConfig
from tinkex.types.account.checkpoints import check_name

ONE = "/training_runs/s:train:0/checkpoints/weights/first"
PATH = "tinker://s:train:0/weights/first"


async def test_a_checkpoint_is_listed_with_all_its_fields(world: World) -> None:
    await world.save(user_metadata={"step": "5"}, expires_at=4e9)
    body = await world.call("GET", "/training_runs/s:train:0/checkpoints", 200)
    (seen,) = body["checkpoints"]
    assert seen["checkpoint_id"] == "weights/first"
    assert seen["checkpoint_type"] == "training"
    assert seen["tinker_path"] == PATH
    assert seen["size_bytes"] == 10242
    assert seen["user_metadata"] == {"step": "5"}
    assert seen["expires_at"] == "2096-10-02T07:06:40Z"
    assert not seen["public"]


async def test_all_checkpoints_of_a_user_are_paged_newest_first(world: World) -> None:
    for n in range(5):
        await world.save(f"c{n}", created_at=1000.0 + n)
    page = await world.call("GET", "/checkpoints?limit=2&offset=1", 200)
    assert [c["checkpoint_id"] for c in page["checkpoints"]] == ["weights/c3", "weights/c2"]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}


async def test_the_run_shows_its_last_checkpoints(world: World) -> None:
    await world.save("a")
    await world.save("b", "sampler_weights")
    run = await world.call("GET", "/training_runs/s:train:0", 200)
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/a"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/b"
    assert (run["lora_rank"], run["is_lora"], run["corrupted"]) == (8, True, False)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", ONE, None),
        ("POST", f"{ONE}/publish", None),
        ("DELETE", f"{ONE}/publish", None),
        ("PUT", f"{ONE}/ttl", {"ttl_seconds": 7200}),
        ("GET", f"{ONE}/archive", None),
        ("GET", f"{ONE}/external_weights_urls", None),
        ("POST", "/weights_info", {"tinker_path": PATH}),
        ("POST", "/copy_weights", {"source_path": PATH, "destination_project_id": "p"}),
        ("GET", "/training_runs/s:train:0", None),
        ("GET", "/training_runs/s:train:0/checkpoints", None),
    ],
)
async def test_a_private_checkpoint_does_not_exist_for_others(
    world: World, method: str, path: str, body: object
) -> None:
    """The answer to Bob is the same whether Ann's checkpoint exists or not."""
    await world.save()
    await world.call(method, path, 404, key="tml-bob", json=body)
    assert world.store.checkpoints.get(PATH) is not None


async def test_a_public_checkpoint_is_read_by_others_and_changed_only_by_its_owner(
    world: World,
) -> None:
    await world.save()
    await world.save("private")
    await world.call("POST", f"{ONE}/publish", 204)
    await world.call("POST", f"{ONE}/publish", 204)
    info = await world.call("POST", "/weights_info", 200, key="tml-bob", json={"tinker_path": PATH})
    assert info["lora_rank"] == 8
    assert info["train_unembed"] is False
    body = await world.call("GET", "/training_runs/s:train:0/checkpoints", 200, key="tml-bob")
    assert [c["checkpoint_id"] for c in body["checkpoints"]] == ["weights/first"]
    await world.call("DELETE", ONE, 404, key="tml-bob")
    await world.call("PUT", f"{ONE}/ttl", 404, key="tml-bob", json={"ttl_seconds": None})
    runs = await world.call("GET", "/training_runs?access_scope=accessible", 200, key="tml-bob")
    assert runs["cursor"]["total_count"] == 1
    runs = await world.call("GET", "/training_runs?access_scope=owned", 200, key="tml-bob")
    assert runs["training_runs"] == []
    await world.call("DELETE", f"{ONE}/publish", 204)
    await world.call("POST", "/weights_info", 404, key="tml-bob", json={"tinker_path": PATH})


async def test_deleting_removes_the_row_and_the_folder(world: World) -> None:
    made = await world.save()
    await world.call("DELETE", ONE, 204)
    await world.call("DELETE", ONE, 404)
    assert not (await world.shelf.at_hand(made.folder)).exists()


@pytest.mark.parametrize("ttl", [0, -1, 3599, 11 * 366 * 24 * 3600, 1.5, "x", True])
async def test_a_ttl_out_of_range_is_refused(world: World, ttl: object) -> None:
    await world.save()
    body = await world.call("PUT", f"{ONE}/ttl", 400, json={"ttl_seconds": ttl})
    assert "ttl_seconds" in body["detail"]
    await world.call("PUT", f"{ONE}/ttl", 400, json={})


async def test_a_ttl_ends_a_checkpoint_and_null_keeps_it(world: World) -> None:
    """Expiry is real: the sweeper removes row and folder."""
    made = await world.save()
    await world.save("kept")
    await world.call("PUT", f"{ONE}/ttl", 204, json={"ttl_seconds": 3600})
    kept = "/training_runs/s:train:0/checkpoints/weights/kept/ttl"
    await world.call("PUT", kept, 204, json={"ttl_seconds": 3600})
    await world.call("PUT", kept, 204, json={"ttl_seconds": None})
    sweeper = Sweeper(world.store, world.shelf, ServerConfig())
    await sweeper.sweep(time.time() + 3500)
    assert (await world.shelf.at_hand(made.folder)).exists()
    await sweeper.sweep(time.time() + 3700)
    assert not (await world.shelf.at_hand(made.folder)).exists()
    body = await world.call("GET", "/training_runs/s:train:0/checkpoints", 200)
    assert [c["checkpoint_id"] for c in body["checkpoints"]] == ["weights/kept"]


async def test_each_file_has_a_signed_link_that_resumes(world: World) -> None:
    """R26: no key is needed, and a Range goes on where a download broke."""
    await world.save("e", "external_weights")
    at = "/training_runs/s:train:0/checkpoints/external_weights/e/external_weights_urls"
    body = await world.call("GET", at, 200)
    assert sorted(body["urls"]) == ["adapter_config.json", "adapter_model.safetensors"]
    url = body["urls"]["adapter_model.safetensors"]
    whole = (await world.http.get(url)).content
    assert whole == bytes(range(256)) * 40
    rest = await world.http.get(url, headers={"Range": "bytes=10000-"})
    assert (rest.status_code, rest.content) == (206, whole[10000:])


async def test_a_link_that_was_changed_or_is_over_opens_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.save()
    url = (await world.call("GET", f"{ONE}/external_weights_urls", 200))["urls"][
        "adapter_config.json"
    ]
    token = urlsplit(url).path.split("/")[4]
    for wrong in (token[:-2] + "xx", "x" + token, token.split(".")[0], "a.b"):
        assert (await world.http.get(url.replace(token, wrong))).status_code == 403
    later = time.time() + 3700
    monkeypatch.setattr(time, "time", lambda: later)
    assert (await world.http.get(url)).status_code == 403


async def test_a_link_to_a_deleted_checkpoint_is_a_404(world: World) -> None:
    await world.save()
    body = await world.call("GET", f"{ONE}/external_weights_urls", 200)
    await world.call("DELETE", ONE, 204)
    assert (await world.http.get(body["urls"]["adapter_config.json"])).status_code == 404


async def test_the_archive_is_a_tar_that_comes_by_redirect_or_as_json(world: World) -> None:
    await world.save()
    # The oldest SDKs send both headers and understand a redirect only.
    headers = [("x-api-key", "tml-ann"), ("accept", "application/json")]
    headers.append(("accept", "application/gzip"))
    answer = await world.http.get(f"/api/v1{ONE}/archive", headers=headers)
    assert answer.status_code == 302
    assert answer.headers["expires"].endswith("GMT")
    whole = await world.http.get(answer.headers["location"])
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as tar:
        assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors"]
        extracted = tar.extractfile("adapter_model.safetensors")
        assert extracted is not None
        assert extracted.read() == bytes(range(256)) * 40
    body = await world.call("GET", f"{ONE}/archive", 200, headers={"accept": "application/json"})
    assert set(body) == {"url", "expires"}
    part = await world.http.get(body["url"], headers={"Range": "bytes=700-1999"})
    assert (part.status_code, part.content) == (206, whole.content[700:2000])
    beyond = await world.http.get(body["url"], headers={"Range": "bytes=99999999-"})
    assert beyond.status_code == 416


async def test_copying_is_idempotent_and_independent_of_its_source(world: World) -> None:
    made = await world.save()
    await world.call("POST", f"{ONE}/publish", 204)
    request = {"source_path": PATH, "destination_project_id": "p", "ttl_seconds": 7200}
    headers = {"x-idempotency-key": "once"}
    answers = await asyncio.gather(
        *(
            world.call(
                "POST", "/copy_weights", 200, key="tml-bob", json=request, headers=dict(headers)
            )
            for _ in range(3)
        )
    )
    paths = {answer["tinker_path"] for answer in answers}
    assert len(paths) == 1
    await world.call("DELETE", ONE, 204)
    copy = world.store.checkpoints.get(paths.pop())
    assert copy is not None
    assert copy.folder != made.folder
    assert ((await world.shelf.at_hand(copy.folder)) / "adapter_config.json").exists()
    assert (copy.user_id, copy.project_id, copy.public) == ("bob", "p", False)
    assert copy.expires_at is not None
    again = await world.call("POST", "/copy_weights", 404, key="tml-bob", json=request)
    assert "tinker://" in again["detail"]


async def test_an_access_token_opens_a_foreign_checkpoint_for_copying(world: World) -> None:
    await world.save()
    token = (await world.call("POST", "/auth/token", 200))["jwt"]
    request = {"source_path": PATH, "destination_project_id": "p"}
    headers = {"x-tinker-weights-access-token": token}
    body = await world.call(
        "POST", "/copy_weights", 200, key="tml-bob", json=request, headers=headers
    )
    run = body["tinker_path"].split("/")[2]
    seen = await world.call("GET", f"/training_runs/{run}", 200, key="tml-bob")
    assert seen["model_owner"] == "bob"


@pytest.mark.parametrize(
    "path",
    [
        "tinker://s:train:0/weights",
        "tinker://s:train:0/weights/../../etc",
        "tinker://s:train:0/weights/..",
        "tinker://s:train:0/other/first",
        "tinker:///weights/first",
        "file:///etc/passwd",
        "tinker://s:train:0/weights/a\u0000b",
        "",
    ],
)
async def test_a_malformed_path_is_a_400(world: World, path: str) -> None:
    await world.call("POST", "/weights_info", 400, json={"tinker_path": path})


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", ".hidden", "a\\b", "a\nb", "x" * 201])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="name"):
        check_name(name)


@pytest.mark.parametrize("name", ["final", "000010", "step=3,lr=1e-4", "v1.2_x", "a" * 200])
def test_names_people_use_are_accepted(name: str) -> None:
    assert check_name(name) == name


async def test_a_taken_name_is_refused_unless_overwrite_or_the_same_request(world: World) -> None:
    path = checkpoints.parse_path(PATH)
    assert await world.shelf.admit(path, overwrite=False) is None
    first = await world.save(request_id="r1")
    with pytest.raises(InvalidInputError, match="overwrite"):
        await world.shelf.admit(path, overwrite=False, request_id="r2")
    again = await world.shelf.admit(path, overwrite=False, request_id="r1")
    assert again is not None
    assert again.folder == first.folder
    assert await world.shelf.admit(path, overwrite=True) is None
    second = await world.save()
    assert not (await world.shelf.at_hand(first.folder)).exists()
    assert (await world.shelf.at_hand(second.folder)).exists()


async def test_folders_without_a_row_go_to_quarantine_and_others_stay(world: World) -> None:
    made = await world.save()
    listed = world.shelf.new_ephemeral_folder("s:sample:0")
    world.store.sampling.create(
        rows.sampling(folder=world.shelf.folders.name(listed), ephemeral=True)
    )
    world.shelf.end_writing(listed)
    saving = world.shelf.new_folder(checkpoints.parse_path(PATH))
    aside = saving.with_name(f".{saving.name}-x1y2")
    strays = [
        (await world.shelf.at_hand(made.folder)).parent / "half-written",
        world.shelf.ephemeral_root / "lost",
    ]
    for folder in (listed, aside, *strays):
        folder.mkdir()
    assert await world.shelf.set_strays_aside() == 2
    assert not any(folder.exists() for folder in strays)
    aside_names = {f.name for f in world.shelf.folders.quarantine_root.rglob("*") if f.is_dir()}
    assert {folder.name for folder in strays} <= aside_names
    assert all(
        folder.exists() for folder in (listed, aside, (await world.shelf.at_hand(made.folder)))
    )


async def test_storage_is_counted_in_byte_hours(world: World) -> None:
    made = await world.save()
    sweeper = Sweeper(world.store, world.shelf, ServerConfig())
    start = time.time() // 3600 * 3600
    await sweeper.sweep(start)
    await sweeper.sweep(start + 1800)
    rows = world.store.usage.events("ann", start, start + 3600)
    assert {row.kind: row.count for row in rows}["storage"] == made.size_bytes / 2


def test_encrypted_files_are_opened_by_their_recipient_alone(tmp_path: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    (tmp_path / "adapter.bin").write_bytes(b"weights" * 1000)
    size = encrypt_folder(tmp_path, [str(identity.to_public())])
    (sealed,) = tmp_path.iterdir()
    assert sealed.name == "adapter.bin.age"
    assert size == sealed.stat().st_size
    assert pyrage.decrypt(sealed.read_bytes(), [identity]) == b"weights" * 1000
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed.read_bytes(), [pyrage.x25519.Identity.generate()])


@pytest.mark.parametrize("bad", [[], ["age1nonsense"], ["hello"], ["ssh-rsa x"]])
def test_bad_recipients_are_refused(bad: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="age"):
        check_recipients(bad)
