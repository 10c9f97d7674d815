"""A checkpoint is what its bytes are: no digest that a file claims decides what is shared."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hostile_tar
import numpy as np
import pytest
from app_world import AppWorld, open_app
from safetensors.numpy import load, save
from wire_client import save_body

ANN, BOB = {"key": "tml-ann"}, {"key": "tml-bob"}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROMPTS = [list(range(10 + 3 * n, 28 + 3 * n)) for n in range(6)]
UNSEEN = [list(range(90 - 3 * n, 60 - 3 * n, -1)) for n in range(6)]
LONG = [[7 + n] * 120 for n in range(4)]
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture
async def torch_world(tmp_path: Path, tiny_model: Path) -> AsyncIterator[AppWorld]:
    """A server on a tiny real model with two users, `tml-ann` and `tml-bob`."""
    async with open_app(
        tmp_path / "data",
        engine="torch",
        models=(str(tiny_model),),
        aliases={"toy": str(tiny_model)},
        api_keys=("tml-ann=ann", "tml-bob=bob"),
        deterministic=True,
    ) as world:
        yield world


async def _published(world: AppWorld, name: str = "hers") -> str:
    """The path of a checkpoint of ann's that changes what the model says, open to everybody."""
    model = await world.model(**ANN)
    for seq_id in (1, 3, 5):
        await world.result((await world.train(model, seq_id, PROMPTS[0], **ANN)).json(), **ANN)
        await world.result((await world.step(model, seq_id + 1, 0.05, **ANN)).json(), **ANN)
    saved = await world.result(
        await world.ok("save_weights", save_body(model, 7, name), **ANN), **ANN
    )
    path = str(saved["path"])
    await world.call("POST", f"{_route(path)}/publish", 204, **ANN)
    return path


def _route(path: str) -> str:
    run, rest = path.removeprefix("tinker://").split("/", 1)
    return f"/training_runs/{run}/checkpoints/{rest}"


async def _files(world: AppWorld, path: str, key: str) -> dict[str, bytes]:
    """What a download of a checkpoint holds."""
    headers = {"accept": "application/json"}
    link = await world.call("GET", f"{_route(path)}/archive", 200, key=key, headers=headers)
    answer = await world.http.get(link["url"])
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        members = [(member.name, archive.extractfile(member)) for member in archive]
        return {name: file.read() for name, file in members if file is not None}


async def _import(world: AppWorld, files: dict[str, bytes], **who: str) -> str:
    body = hostile_tar.plain(*files.items())
    headers = {"content-type": "application/x-tar"}
    return str((await world.ok("checkpoints/import", body, headers=headers, **who))["tinker_path"])


def _other_weights(weights: bytes) -> bytes:
    rng = np.random.default_rng(5)
    tensors = {
        name: rng.normal(size=array.shape).astype(array.dtype)
        for name, array in load(weights).items()
    }
    return bytes(save(tensors))


async def _sampler(world: AppWorld, path: str, **who: str) -> str:
    asked = {
        "session_id": await world.session(**who),
        "sampling_session_seq_id": 0,
        "model_path": path,
    }
    return str((await world.ok("create_sampling_session", asked, **who))["sampling_session_id"])


class Greedy:
    """Greedy samples of one sampling session."""

    def __init__(self, world: AppWorld, sampler: str, **who: str) -> None:
        self._world, self._sampler, self._who = world, sampler, who
        self._next = 0

    async def __call__(self, prompts: list[list[int]], max_tokens: int = 8) -> Answers:
        asked = [self._ask(prompt, max_tokens) for prompt in prompts]
        return list(await asyncio.gather(*asked))

    async def _ask(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        self._next += 1
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": self._next,
            "num_samples": 1,
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": max_tokens, "temperature": 0.0, "stop": []},
        }
        promise = await self._world.ok("asample", body, **self._who)
        asked = {"request_id": promise["request_id"]}
        answer = await self._world.post("retrieve_future", asked, **self._who)
        while answer.status_code == 408:
            answer = await self._world.post("retrieve_future", asked, **self._who)
        (sequence,) = answer.json()["sequences"]
        return sequence["tokens"], sequence["logprobs"]


@pytest.mark.timeout(1200)
async def test_an_import_that_claims_anothers_digest_changes_nobodys_samples(
    torch_world: AppWorld,
) -> None:
    """Bob's long prompts run beside ann's: rows of one pass are told apart by their adapters."""
    path = await _published(torch_world)
    ann = Greedy(torch_world, await _sampler(torch_world, path, **ANN), **ANN)
    before = await ann(PROMPTS)
    files = await _files(torch_world, path, "tml-bob")
    await torch_world.call("DELETE", f"{_route(path)}/publish", 204, **ANN)
    forged = await _import(torch_world, files | {WEIGHTS: _other_weights(files[WEIGHTS])}, **BOB)
    bob = Greedy(torch_world, await _sampler(torch_world, forged, **BOB), **BOB)
    stop = asyncio.Event()

    async def go_on() -> int:
        rounds = 0
        while not stop.is_set() or not rounds:
            await bob(LONG, max_tokens=24)
            rounds += 1
        return rounds

    attack = asyncio.create_task(go_on())
    seen = [await ann(PROMPTS) for _ in range(3)]
    unseen = await ann(UNSEEN)
    stop.set()
    assert await attack
    assert seen == [before] * 3
    later = await ann(UNSEEN)
    alone = Greedy(
        torch_world, await _sampler(torch_world, await _copy(torch_world, path), **ANN), **ANN
    )
    assert unseen == later == await alone(UNSEEN)


async def _copy(world: AppWorld, path: str) -> str:
    """The same adapter under another config's digest: nothing cached serves it."""
    files = await _files(world, path, "tml-ann")
    config = json.loads(files[CONFIG]) | {"inference_mode": False}
    return await _import(world, files | {CONFIG: json.dumps(config).encode()}, **ANN)


@pytest.mark.timeout(1200)
async def test_a_claimed_digest_is_replaced_by_the_computed_one(torch_world: AppWorld) -> None:
    path = await _published(torch_world)
    files = await _files(torch_world, path, "tml-bob")
    true = json.loads(files["tinkex.json"])["content_sha256"]
    honest = await _import(torch_world, files, **BOB)
    forged = await _import(torch_world, files | {WEIGHTS: _other_weights(files[WEIGHTS])}, **BOB)
    scaled = json.loads(files[CONFIG]) | {"lora_alpha": 99}
    other = await _import(torch_world, files | {CONFIG: json.dumps(scaled).encode()}, **BOB)
    bare = await _import(torch_world, {name: files[name] for name in (CONFIG, WEIGHTS)}, **BOB)
    digests = {}
    for name, of in {"honest": honest, "forged": forged, "scaled": other}.items():
        manifest = json.loads((await _files(torch_world, of, "tml-bob"))["tinkex.json"])
        digests[name] = manifest["content_sha256"]
    assert digests["honest"] == true
    assert len({true, digests["forged"], digests["scaled"]}) == 3
    assert set(await _files(torch_world, bare, "tml-bob")) == {CONFIG, WEIGHTS}


@pytest.mark.timeout(1200)
async def test_a_damaged_checkpoint_is_refused_by_name_and_the_run_goes_on(
    torch_world: AppWorld, tmp_path: Path
) -> None:
    path = await _published(torch_world, "fragile")
    (file,) = (tmp_path / "data" / "checkpoints").rglob(WEIGHTS)
    content = bytearray(file.read_bytes())
    content[-400:] = bytes(byte ^ 0x10 for byte in content[-400:])
    file.write_bytes(content)
    model = await torch_world.model(**ANN)
    asked = {"model_id": model, "seq_id": 1, "path": path, "optimizer": False}
    told = await torch_world.result(await torch_world.ok("load_weights", asked, **ANN), **ANN)
    assert "'fragile-" in told["error"]
    assert "is damaged" in told["error"]
    assert told["category"] == "user"
    assert str(tmp_path) not in str(told)
    sampler = await _sampler(torch_world, path, **ANN)
    body = {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 2},
    }
    told = await torch_world.result(await torch_world.ok("asample", body, **ANN), **ANN)
    assert "is damaged" in told["error"]
    trained: Any = await torch_world.train(model, 2, PROMPTS[1], **ANN)
    assert isinstance(await torch_world.result(trained.json(), **ANN), bytes)


@pytest.mark.parametrize("name", ["tinkex.json", "manifest.json"])
async def test_a_manifest_that_is_no_json_is_refused(app_world: AppWorld, name: str) -> None:
    config = ("adapter_config.json", b'{"r": 8, "base_model_name_or_path": "toy"}')
    for wrong in (b"[" * 100_000, b'{"content_sha256": ', b"\xff\xfe", b" " * (2 << 20)):
        answer = await app_world.post(
            "checkpoints/import",
            hostile_tar.plain(config, (name, wrong)),
            headers={"content-type": "application/x-tar"},
        )
        assert answer.status_code == 400, answer.text
        assert name in answer.json()["detail"]


async def test_the_toy_refuses_weights_that_are_not_those_written(
    app_world: AppWorld, tmp_path: Path
) -> None:
    model = await app_world.model()
    saved = await app_world.result(await app_world.ok("save_weights", save_body(model, 1, "x")))
    (file,) = (tmp_path / "checkpoints").rglob("manifest.json")
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"content_sha256": hashlib.sha256(b"other").hexdigest()}))
    asked = {"model_id": model, "seq_id": 2, "path": saved["path"], "optimizer": False}
    told = await app_world.result(await app_world.ok("load_weights", asked))
    assert "'x-" in told["error"]
    assert "is damaged" in told["error"]
