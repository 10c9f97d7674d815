"""A data folder that a killed server left, recorded once, and how training goes on from it.

    python tests/server/recorded_store.py   # in the tree whose format is to be held

`record` trains two runs on the toy engine, kills the server with requests in its journal that have
no end, packs the folder, and writes down what comes of it when the same tree goes on. The test
unpacks the folder in today's tree and expects the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from app_world import AppWorld, open_app
from recorded_database import ARCHIVE, unpack
from server_process import ServerProcess
from wire_client import WireClient, loss_of

from tinkex.store import Store

EXPECTED = ARCHIVE.with_name("store-0010.json")
AGELESS_S = 1e11
SETTINGS = {
    "deterministic": True,
    "snapshot_every_ops": 7,
    **dict.fromkeys(
        ("state_ttl_s", "closed_state_ttl_s", "session_ttl_s", "audit_ttl_s"), AGELESS_S
    ),
    **dict.fromkeys(("journal_ttl_s", "result_ttl_s"), AGELESS_S),
}
"""The recorded folder ages with the repository: nothing in it may end by its time."""
NUM_STEPS = 5


def tokens_of(run: str, step: int) -> list[int]:
    return [(step * 7 + int(run[-1]) * 3 + i) % 50 for i in range(8)]


def train_and_die(folder: Path) -> list[str]:
    """Train two runs on a server that is killed before their last requests ended; their ids."""
    flags = ("--engine", "toy:latency_s=0.05", "--deterministic", "--snapshot-every", "7")
    with ServerProcess(folder, *flags) as server:
        client = WireClient(server.base_url)
        session = client.session()
        runs = [client.model(session, number=number) for number in range(2)]
        for step in range(NUM_STEPS):
            promises = []
            for run in runs:
                first = 3 * step + 1
                promises.append(client.train(run, first, tokens_of(run, step)))
                promises.append(client.step(run, first + 1, learning_rate=0.05))
                promises.append(client.save(run, first + 2, f"step-{step}"))
            if step < NUM_STEPS - 1:
                for promise in promises:
                    client.result(promise)
        server.kill()
        client.close()
    return runs


async def go_on(folder: Path, runs: list[str]) -> dict[str, Any]:
    """Open the folder, let each run end what it accepted, train on, and save."""
    async with open_app(folder, **SETTINGS) as world:
        ends = {run: await _finish(world, folder, run) for run in runs}
    store = await asyncio.to_thread(Store.in_folder, folder)  # by now every end is written
    for run, end in ends.items():
        rows = await store.call(store.journal.since, run, -1)
        end["journal"] = [[row.seq_id, row.kind, row.state] for row in rows]
    await asyncio.to_thread(store.close)
    return ends


async def _finish(world: AppWorld, folder: Path, run: str) -> dict[str, Any]:
    losses, first = [], 3 * NUM_STEPS + 1
    for step in range(3):
        promise = (await world.train(run, first + 2 * step, tokens_of(run, step))).json()
        losses.append(loss_of(await world.result(promise)))
        await world.result((await world.step(run, first + 2 * step + 1, 0.05)).json())
    body = {"model_id": run, "seq_id": first + 6, "path": "final", "overwrite": False}
    saved = await world.result(await world.ok("save_weights", body))
    (checkpoint,) = (folder / "checkpoints").glob(f"*{run.rpartition(':')[2]}/weights/final-*")
    return {
        "losses": losses,
        "path": saved["path"],
        "weights": hashlib.sha256(
            b"".join(_arrays(file) for file in sorted(checkpoint.rglob("*.npz")))
        ).hexdigest(),
    }


def _arrays(file: Path) -> bytes:
    """Names, kinds and numbers; the bytes of the archive around them are Python's own."""
    with np.load(file) as stored:
        parts = [(name, stored[name]) for name in sorted(stored.files)]
    return b"".join(
        f"{name} {each.dtype} {each.shape}".encode() + each.tobytes() for name, each in parts
    )


def _packed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without secrets, locks and names of this machine's users."""
    if any(word in entry.name for word in ("secrets", ".lock", "-shm")):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def record() -> None:
    with tempfile.TemporaryDirectory() as name:
        runs = train_and_die(Path(name))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(Path(name) / "data", arcname=".", filter=_packed)
    with tempfile.TemporaryDirectory() as name:
        unpack(Path(name))
        result = asyncio.run(go_on(Path(name), runs))
    EXPECTED.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{ARCHIVE.name}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    record()
