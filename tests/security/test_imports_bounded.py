"""An import costs what it may, before an engine sees it, and in its user's own turn."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

import hostile_tar
import numpy as np
import pytest
from app_world import AppWorld, open_app
from patience import soon
from safetensors.numpy import save
from wire_client import save_body

from tinkex.contract.cost import FILE
from tinkex.store import checkpoints

KEYS = ("tml-ann=ann", "tml-bob=bob")
ANN = {"key": "tml-ann"}
TAR = {"content-type": "application/x-tar"}


def empty_tensors(count: int) -> bytes:
    """A safetensors file of nothing but names."""
    about = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = ",".join(f'"base_model.model.m{n}.lora_A.weight":{about}' for n in range(count))
    header = f"{{{names}}}".encode()
    return struct.pack("<Q", len(header)) + header


def named_tensors(count: int, offsets: str = "data_offsets") -> bytes:
    """A safetensors file of so many bytes, each with a name of its own."""
    entry = '"m%d":{"dtype":"U8","shape":[1],"%s":[%d,%d]}'
    names = ",".join(entry % (n, offsets, n, n + 1) for n in range(count))
    header = f"{{{names}}}".encode()
    return struct.pack("<Q", len(header)) + header + bytes(count)


def infinite_tensor() -> bytes:
    header = b'{"m":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}'
    return struct.pack("<Q", len(header)) + header + b"x"


def archive(config: dict[str, object], weights: bytes) -> bytes:
    files = [("adapter_config.json", json.dumps(config).encode())]
    return hostile_tar.plain(*files, ("adapter_model.safetensors", weights))


def weights_of(rank: int) -> bytes:
    return save({"base_model.model.q.lora_A.weight": np.ones((rank, 4), np.float32)})


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        ({"r": 8}, empty_tensors(FILE.keys + 1), f"names {FILE.keys + 1} tensors"),
        ({"r": 8}, empty_tensors(300_000), "names too much for an adapter"),
        ({"r": 8}, empty_tensors(1), "is empty"),
        ({"r": 2**31}, weights_of(8), "a rank is a whole number from 1 to"),
        ({"r": 16}, weights_of(8), "says r=16, but"),
        ({"r": 8}, weights_of(8)[:-4], "is cut off"),
        ({"r": 8}, weights_of(8) + b"more", "or longer than its header says"),
        ({"r": 8}, b"x" * 40, "cut off within its header"),
        # The same key to whoever parses it, and other bytes.
        (
            {"r": 8},
            named_tensors(FILE.keys + 1, "data_offset\\u0073"),
            f"names {FILE.keys + 1} tensors",
        ),
        ({"r": 8}, infinite_tensor(), "no header of safetensors"),
        ({"r": 16, "rank_pattern": {"q": [1], "v": "x"}}, weights_of(8), "says r=16, but"),
    ],
    ids=[
        *("names", "header", "empty", "rank", "other rank", "cut off", "longer", "no header"),
        *("escaped names", "infinite", "odd ranks"),
    ],
)
async def test_an_import_is_judged_before_the_engine_sees_it(
    tmp_path: Path, config: dict[str, object], weights: bytes, words: str
) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        body = archive(config | {"base_model_name_or_path": "toy"}, weights)
        answer = await world.post("checkpoints/import", body, headers=TAR, **ANN)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["detail"]
        assert not list((tmp_path / "checkpoints").glob("*/*/*"))


async def test_files_of_state_are_judged_too(tmp_path: Path) -> None:
    """An engine reads the gradients of a folder whose manifest says that it has some."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        config = json.dumps({"r": 8, "base_model_name_or_path": "toy"}).encode()
        state = named_tensors(4 * FILE.keys + 1, "data_offset\\u0073")
        files = [("adapter_config.json", config), ("gradients.safetensors", state)]
        answer = await world.post(
            "checkpoints/import", hostile_tar.plain(*files), headers=TAR, **ANN
        )
        assert answer.status_code == 400, answer.text
        assert "gradients.safetensors names" in answer.json()["detail"]


async def saved(world: AppWorld, name: str = "first", number: int = 1, model: str = "") -> dict:
    model = model or await world.model(**ANN)
    promise = await world.ok("save_weights", save_body(model, number, name), **ANN)
    return await world.result(promise, **ANN) | {"model": model}


async def test_an_import_waits_for_its_users_turn(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        path = (await saved(world))["path"]
        row = world.service.store.checkpoints.get(path)
        folder = await world.parts.shelf.at_hand(row.folder)
        body = hostile_tar.plain(*((file.name, file.read_bytes()) for file in folder.iterdir()))
        gate = world.service.workers.training
        gate.resize(1)
        async with gate.slot("ann"):
            sent = asyncio.create_task(world.post("checkpoints/import", body, headers=TAR, **ANN))
            await soon(lambda: gate.num_waiting)
            assert not sent.done()
        assert (await sent).status_code == 200, (await sent).text


async def test_a_run_and_a_user_have_so_many_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model = (await saved(world))["model"]
        monkeypatch.setattr(checkpoints, "MAX_OF_RUN", 2)
        assert "path" in await saved(world, "second", 2, model)
        refused = await saved(world, "third", 3, model)
        assert "one of over 2 checkpoints of a run" in refused["error"]
        monkeypatch.setattr(checkpoints, "MAX_OF_USER", 2)
        refused = await saved(world)
        assert "one of over 2 checkpoints of a user" in refused["error"]
        assert len(list((tmp_path / "checkpoints").glob("*/*/*"))) == 2
