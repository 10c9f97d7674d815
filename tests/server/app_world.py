"""A whole server inside the test's process: real routes, store and worker, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from fastapi import FastAPI
from wire_client import Caller

from tinkex.server.app import create_app
from tinkex.server.http.dependencies import AppDependencies
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.loop_guard import LoopGuard
from tinkex.server.serve import make_pool, open_store
from tinkex.server.service.service import Service


@dataclass
class AppWorld(Caller):
    app: FastAPI
    http: httpx.AsyncClient

    @property
    def parts(self) -> AppDependencies:
        parts: AppDependencies = self.app.state.dependencies
        return parts

    @property
    def service(self) -> Service:
        return self.parts.service

    async def facts(self) -> None:
        """Wait until the vocabulary is known here: before that the engine alone can refuse a token.

        A server gives a busy engine five seconds to say it, then goes on without.
        """
        assert await self.service.catalog.info("toy", timeout_s=60) is not None


def _is_servers(stack: Sequence[FrameType]) -> bool:
    """Whether the server is at work of its own accord, or for a request.

    A test may hold its loop, in which the server runs, also by calling the server's functions.
    """
    is_its_own = True  # the outermost first: who called decides, until the next one does
    for file in [frame.f_code.co_filename for frame in reversed(stack)]:
        if file.endswith("/tinkex/server/door.py"):
            is_its_own = True
        elif "/tests/" in file:
            is_its_own = False
        if "/tinkex/server/" in file and is_its_own:
            return True
    return False


@asynccontextmanager
async def open_app(folder: Path, **settings: Any) -> AsyncIterator[AppWorld]:
    """Start an app over `folder`; leaving the block stops it, so that it can be opened again."""
    config = ServerConfig(**({"engine": "toy", "data_dir": folder, "hold_s": 5.0} | settings))
    store = await asyncio.to_thread(open_store, config)
    try:
        app = await asyncio.to_thread(create_app, config, store, make_pool(config))
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            with LoopGuard(is_ours=_is_servers) as guard:
                yield AppWorld(app, http)
            assert not guard.holds, "\n".join(map(str, guard.holds))
    finally:
        await asyncio.to_thread(store.close)
