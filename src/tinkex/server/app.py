"""Put the server together: routers, error answers, start and stop.

`create_app` takes what it needs as arguments, so that tests run it over an in-process transport
with a store in a temporary folder and a worker of their choice. Routers find everything on
`request.app.state`: `config`, `store`, `service`, `presence`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

import tinkex
from tinkex.server import problems
from tinkex.server.config import ServerConfig
from tinkex.server.presence import Presence
from tinkex.server.routes_service import router as service_router
from tinkex.server.workers import ProcessWorker
from tinkex.store import Store


def create_app(config: ServerConfig, store: Store, workers: Sequence[ProcessWorker]) -> FastAPI:
    """The ASGI application. Its lifespan runs the workers; the caller owns the store."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for worker in workers:
            await worker.start()
        try:
            yield
        finally:
            for worker in workers:
                await worker.close()

    app = FastAPI(title="Tinkex", version=tinkex.__version__, lifespan=lifespan)
    app.state.config = config
    app.state.store = store
    app.state.workers = list(workers)
    app.state.stopping = asyncio.Event()
    app.state.presence = Presence(until_idle_s=config.until_idle_s, parent_pid=config.parent_pid)
    problems.install(app)
    app.include_router(service_router)
    return app
