"""Put the server together: parts, routers, error answers, start and stop.

`create_app` takes what it needs as arguments, so that tests run it over an in-process transport
with a store in a temporary folder and a worker of their choice. Handlers find the parts it makes by
`http.dependencies.dependencies_of`. How a request comes to its handler is in `server/door.py`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from fastapi import FastAPI
from fastapi.routing import APIRoute

import tinkex
from tinkex.server import openapi
from tinkex.server.administration.administration import NOBODY, Administration
from tinkex.server.compat import install as compat
from tinkex.server.compat.refusals import in_their_words
from tinkex.server.console import install as console
from tinkex.server.door import Door, Endpoint
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.files.depot import Depot, refuse_without
from tinkex.server.files.disk_quota import DiskQuota
from tinkex.server.files.private import secret
from tinkex.server.files.signing import Signer
from tinkex.server.files.sweeper import Sweeper
from tinkex.server.guard.auth import Auth, CurrentUser
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.guard.limits import BodyBudget
from tinkex.server.guard.quotas import Quotas
from tinkex.server.http.dependencies import AppDependencies
from tinkex.server.process import problems
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.loop_guard import LoopGuard
from tinkex.server.process.presence import Presence
from tinkex.server.rest import (
    accounts,
    administration,
    audit,
    budgets,
    checkpoint_search,
    checkpoints,
    estimates,
    files,
    imports,
    run_management,
    runs,
    sessions,
    uploads,
)
from tinkex.server.routes import futures, sampling, service, training
from tinkex.server.service.service import Service
from tinkex.server.workers.pool import Pool
from tinkex.store import Store

# Routes are matched in this order: those that are called most stand first.
_OURS = (futures.router, sampling.router, training.router, service.api, service.router)
REST = (
    accounts,
    runs,
    run_management,
    checkpoints,
    checkpoint_search,
    imports,
    uploads,
    sessions,
    audit,
    budgets,
    estimates,
    administration,
    files,
)


def create_app(config: ServerConfig, store: Store, pool: Pool) -> Door:
    """The ASGI application. Its lifespan runs the pool; the caller owns the store. Blocks."""
    dependencies = _make_dependencies(config, store, pool)
    app = Door(
        title="Tinkex",
        version=tinkex.__version__,
        lifespan=_lifespan,
        swagger_ui_oauth2_redirect_url=None,
    )
    for router in (*_OURS, *(module.router for module in REST)):
        # As they are: an included router is resolved again for each app, its first request waits.
        app.router.routes += router.routes
    chat_formats = compat.install(app, dependencies.service, dependencies.sandbox).chat_formats
    console.install(app, dependencies, chat_formats)
    problems.install(app, in_their_words)
    openapi.install(app)
    app.open(dependencies, {**_hot_endpoints(), **compat.endpoints()})
    _resolve_routes(app)
    return app


def _resolve_routes(app: FastAPI) -> None:
    """Let FastAPI work out what the handlers of included routers declare, not on the event loop.

    It would do so for each router when a request first passes by.
    """
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "headers": []})


def _make_dependencies(config: ServerConfig, store: Store, pool: Pool) -> AppDependencies:
    data_dir = config.data_dir
    quotas = Quotas(store, config)
    auth = Auth.open(
        store,
        config.api_keys,
        secret=secret(store, data_dir, "jwt"),
        key_required=config.key_required,
    )
    disk_quota = DiskQuota(store.stored, lambda user_id: quotas.limit(user_id, "disk_bytes"))
    shelf = Shelf(store, data_dir, _open_depot(config), disk_quota)
    failed_logins = FailedLogins(
        lambda who: store.audit.record(NOBODY, "login_refused", {"address": who})
    )
    service = Service(config, store, shelf, pool, auth, failed_logins, quotas)
    administration = Administration(service, auth, quotas)
    return AppDependencies(
        config=config,
        store=store,
        shelf=shelf,
        signer=Signer(secret(store, data_dir, "links")),
        service=service,
        auth=auth,
        quotas=quotas,
        failed_logins=failed_logins,
        administration=administration,
        presence=Presence(until_idle_s=config.until_idle_s, parent_pid=config.parent_pid),
        bodies=BodyBudget(config.max_held_body_bytes),
        parsed_bodies=BodyBudget(config.max_held_body_bytes),
    )


def _open_depot(config: ServerConfig) -> Depot | None:
    if config.storage:
        return Depot.open(config.storage, config.data_dir, config.storage_cache_bytes)
    refuse_without(config.data_dir)
    return None


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    parts: AppDependencies = app.state.dependencies
    await parts.service.start()
    sweeper = asyncio.create_task(Sweeper(parts.store, parts.shelf, parts.config).run())
    lag = asyncio.create_task(parts.metrics.watch_loop())
    try:
        with LoopGuard() if parts.config.debug else nullcontext():
            yield
    finally:
        if (launcher := app.state.console.launcher) is not None:
            await launcher.close()
        sweeper.cancel()
        lag.cancel()
        await asyncio.gather(sweeper, lag, return_exceptions=True)
        await parts.service.stop()
        await asyncio.to_thread(parts.sandbox.close)
        if parts.shelf.depot is not None:
            parts.shelf.depot.close()


def _hot_endpoints() -> dict[str, Endpoint]:
    """The handlers of the training API that any user may call, by their paths.

    A route that needs an administrator goes through FastAPI, which resolves what it declares: the
    door does not ask for that.
    """
    endpoints: dict[str, Endpoint] = {}
    for router in _OURS:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.methods == {"POST"}:
                declared = inspect.signature(route.endpoint, eval_str=True).parameters
                if declared["user"].annotation == CurrentUser:
                    endpoints[route.path] = route.endpoint
    return endpoints
