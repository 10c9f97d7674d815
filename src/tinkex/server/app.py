"""Put the server together: routers, error answers, start and stop.

`create_app` takes what it needs as arguments, so that tests run it over an in-process transport
with a store in a temporary folder and a worker of their choice. Routers find everything on
`request.app.state`: `config`, `store`, `auth`, `shelf`, `signer`, `service`, `presence`, `metrics`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tinkex
from tinkex.server import (
    openapi,
    problems,
    rest,
    routes_futures,
    routes_sampling,
    routes_service,
    routes_training,
)
from tinkex.server.config import ServerConfig
from tinkex.server.metrics import Metrics
from tinkex.server.presence import Presence
from tinkex.server.service import Service
from tinkex.server.sweeper import Sweeper
from tinkex.server.workers import ProcessWorker
from tinkex.store import Store


def create_app(config: ServerConfig, store: Store, workers: Sequence[ProcessWorker]) -> FastAPI:
    """The ASGI application. Its lifespan runs the workers; the caller owns the store. Blocks."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service: Service = app.state.service
        await service.start()
        sweeper = asyncio.create_task(Sweeper(store, app.state.shelf).run())
        try:
            yield
        finally:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
            await service.stop()

    app = FastAPI(title="Tinkex", version=tinkex.__version__, lifespan=lifespan)
    app.state.config = config
    app.state.metrics = Metrics()
    app.state.presence = Presence(until_idle_s=config.until_idle_s, parent_pid=config.parent_pid)
    # Routes are matched in this order: what is called most stands first.
    for module in (routes_futures, routes_sampling, routes_training, routes_service):
        app.include_router(module.router)
    rest.install(app, store, config.data_dir, config.api_keys, _finish_session(app))
    app.state.service = Service(config, store, app.state.shelf, workers)
    problems.install(app)
    openapi.install(app)
    app.add_middleware(Watch, metrics=app.state.metrics, presence=app.state.presence)
    return app


def _finish_session(app: FastAPI) -> Callable[[str], Awaitable[None]]:
    async def finish(session_id: str) -> None:
        service: Service = app.state.service
        await service.finish_session(session_id)

    return finish


class Watch:
    """Measure every request and note that somebody is there. Plain ASGI: it must cost nothing."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, presence: Presence) -> None:
        self._app = app
        self._metrics = metrics
        self._presence = presence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._presence.request_started()
        try:
            await self._app(scope, receive, watch)
        finally:
            self._presence.request_ended()
            route = scope.get("route")
            name = getattr(route, "path", "unknown")
            self._metrics.observe(name, status, time.perf_counter() - started)
