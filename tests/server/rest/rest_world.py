"""The REST routes over an in-process transport, with a real store and real folders."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import store_rows as rows
from fastapi import FastAPI
from wire_client import Caller

from tinkex.server import problems, rest
from tinkex.server.files.checkpoints import Shelf, TinkerPath, folder_size
from tinkex.store import Checkpoint, Store

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
        app = FastAPI()
        problems.install(app)
        finished: list[str] = []

        async def note(session_id: str) -> None:
            finished.append(session_id)

        rest.install(app, store, self._folder, self._keys, on_session_finished=note)
        # A handler for Exception answers 500 and raises again; the tests want the answer.
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://tinkex.test")
        self._world = World(app, store, app.state.shelf, http, finished)
        return self._world

    async def __aexit__(self, *exc: object) -> None:
        await self._world.http.aclose()
        self._world.store.close()
