"""The runs of a server and of the folders on this disk in one place, for the person who runs it.

Only for the owner: folders are read in their name. A run of the server keeps its page.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tinkex.server.console.folder_runs import FolderRuns
from tinkex.server.console.resumption import named_folders
from tinkex.server.console.source import Query, Source
from tinkex.server.runs.curves import Curve
from tinkex.store import User

RUNS = "runs"
"""Where the recipes write when nothing else is said."""


class OwnersRuns(Source):
    is_local = False
    has_folders = True

    def __init__(self, server: Source, base: Path) -> None:
        """Add the folders of `base`, where this server was started, and all that have a name."""
        self._server = server
        self._folders = FolderRuns(base.resolve() / RUNS, named_folders)

    @property
    def is_ending(self) -> bool:
        return self._server.is_ending

    async def _of(self, run_id: str) -> Source:
        is_folder = await asyncio.to_thread(self._folders.has, run_id)
        return self._folders if is_folder else self._server

    async def page(self, user: User, query: Query) -> dict[str, Any]:
        return await (self._folders if query.view == "folders" else self._server).page(user, query)

    async def run(self, user: User | None, run_id: str) -> dict[str, Any]:
        return await (await self._of(run_id)).run(user, run_id)

    async def check(self, user: User | None, run_id: str) -> None:
        await (await self._of(run_id)).check(user, run_id)

    async def curves(self, run_id: str) -> dict[str, Curve]:
        return await (await self._of(run_id)).curves(run_id)

    def doing(self, run_id: str) -> str:
        return self._server.doing(run_id)

    async def rollout_steps(self, run_id: str) -> list[int]:
        return await (await self._of(run_id)).rollout_steps(run_id)

    async def rollouts(self, run_id: str, step: int) -> list[dict[str, Any]]:
        return await (await self._of(run_id)).rollouts(run_id, step)

    async def base_models(self) -> list[str]:
        return await self._server.base_models()

    def agreement(self, user: User) -> bool | None:
        return self._server.agreement(user)
