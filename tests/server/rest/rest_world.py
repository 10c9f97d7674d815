"""The REST routes over an in-process transport, with a real store and real folders."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import store_rows as rows
from fastapi import FastAPI
from wire_client import Caller

from tinkex.server.app import create_app
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.files.folders import folder_size
from tinkex.server.process.config import ServerConfig
from tinkex.server.serve import make_pool
from tinkex.store import Checkpoint, Store
from tinkex.types.account.checkpoints import TinkerPath

KEYS = ("tml-ann=ann", "tml-bob=bob")


@dataclass
class World(Caller):
    """Two users, Ann with a session and a run, and Bob with nothing."""

    app: FastAPI
    store: Store
    shelf: Shelf
    http: httpx.AsyncClient
    finished: list[str] = field(default_factory=list)

    async def save(
        self, name: str = "first", kind: str = "weights", user_id: str = "ann", **changes: Any
    ) -> Checkpoint:
        """Write a checkpoint folder and list it, as a training request would."""
        path = TinkerPath("s:train:0", kind, name)  # type: ignore[arg-type]
        folder = self.shelf.new_folder(path)
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 40)
        made = rows.checkpoint(
            name,
            kind,
            user_id=user_id,
            folder=self.shelf.folders.name(folder),
            size_bytes=folder_size(folder),
            **changes,
        )
        await self.shelf.register(made)
        return made


class open_world:
    """`async with open_world(folder, keys) as world`; the same folder may be opened again."""

    def __init__(self, folder: Path, keys: tuple[str, ...]) -> None:
        self._folder = folder
        self._keys = keys

    async def __aenter__(self) -> World:
        store = Store.in_folder(self._folder, full_sync=False)
        config = ServerConfig(engine="toy", data_dir=self._folder, api_keys=self._keys)
        app = create_app(config, store, make_pool(config))  # no worker runs: nothing computes
        finished: list[str] = []

        async def note(session_id: str) -> None:
            finished.append(session_id)

        app.state.dependencies.service.finish_session = note
        # A handler for Exception answers 500 and raises again; the tests want the answer.
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self._world = World(app, store, app.state.dependencies.shelf, http, finished)
        return self._world

    async def __aexit__(self, *exc: object) -> None:
        await self._world.http.aclose()
        await self._world.app.state.dependencies.service.stop()
        self._world.store.close()
