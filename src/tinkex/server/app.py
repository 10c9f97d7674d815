"""Put the server together: routers, error answers, start and stop.

`create_app` takes what it needs as arguments, so that tests run it over an in-process transport
with a store in a temporary folder and a worker of their choice. Routers find everything on
`request.app.state`: `config`, `store`, `auth`, `failed_logins`, `shelf`, `signer`, `service`,
`presence`, `metrics`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

import tinkex
from tinkex.server import openapi
from tinkex.server.administration import routes as administration
from tinkex.server.administration.administration import Administration
from tinkex.server.compat import install as compat
from tinkex.server.compat.refusals import in_their_words
from tinkex.server.console import install as console
from tinkex.server.fairness.gate import FairGate
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.files.depot import Depot, refuse_without
from tinkex.server.files.private import secret
from tinkex.server.files.signing import Signer
from tinkex.server.files.sweeper import Sweeper
from tinkex.server.guard.auth import Auth, CurrentUser, current_user
from tinkex.server.guard.callers import foreign_sees_users, foreign_user, is_foreign
from tinkex.server.guard.connections import HOLD_HEAD
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.guard.limits import BodyBudget, body_limit
from tinkex.server.guard.origin import check_local
from tinkex.server.guard.quotas import LIMITED_PATHS, Quotas
from tinkex.server.http.bodies import READING_AT_ONCE, Answer, headers_of, let_go, receive_body
from tinkex.server.process import problems
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.logs import answering
from tinkex.server.process.presence import Presence
from tinkex.server.rest import accounts, audit, checkpoints, files, imports, runs, sessions
from tinkex.server.routes import futures as routes_futures
from tinkex.server.routes import sampling as routes_sampling
from tinkex.server.routes import service as routes_service
from tinkex.server.routes import training as routes_training
from tinkex.server.service.metrics import ServerMetrics
from tinkex.server.service.service import Service
from tinkex.server.workers.pool import Pool
from tinkex.store import Store, User
from tinkex.wire.endpoints import ENDPOINTS

access_logger = logging.getLogger("tinkex.access")
_OURS = (
    routes_futures.router,
    routes_sampling.router,
    routes_training.router,
    routes_service.api,
    routes_service.router,
)
REST = (accounts, runs, checkpoints, imports, sessions, audit, administration, files)
# A burst of thousands of these must not stand between a heartbeat and its answer.
_SUBMITS = frozenset(
    row.path for row in ENDPOINTS.values() if row.size == "large" or row.name == "asample"
)
# What takes room on the disk; polls, heartbeats and deletions go on when it is nearly full.
_STORES = frozenset(
    f"/api/v1/{name}"
    for name in (
        "create_session",
        "create_sampling_session",
        "create_custom_loss",
        "asample",
        "asample_batch",
        "checkpoints/import",
        "copy_weights",
    )
)
MAX_SUBMITTING = 32
SUBMIT_COST = 4096
"""What a request costs beside the bytes of its body, in bytes."""
# For whoever has a key; a probe of its health needs none, and `/metrics` has a role of its own.
_FOR_OPERATORS = frozenset({"/docs", "/redoc", "/openapi.json"})
_WITHOUT_KEY = ("/api/v1/healthz", "/api/v1/signed/")
Endpoint = Callable[[Request, User], Awaitable[Response]]
_ids = random.Random()
_NO_TURN = nullcontext()


def create_app(config: ServerConfig, store: Store, pool: Pool) -> FastAPI:
    """The ASGI application. Its lifespan runs the pool; the caller owns the store. Blocks."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        sweeper = asyncio.create_task(Sweeper(store, shelf, config).run())
        lag = asyncio.create_task(app.state.metrics.watch_loop())
        try:
            yield
        finally:
            sweeper.cancel()
            lag.cancel()
            await asyncio.gather(sweeper, lag, return_exceptions=True)
            await service.stop()
            if shelf.depot is not None:
                shelf.depot.close()

    app = Application(
        title="Tinkex",
        version=tinkex.__version__,
        lifespan=lifespan,
        swagger_ui_oauth2_redirect_url=None,
    )
    data_dir = config.data_dir
    app.state.config = config
    app.state.store = store
    app.state.metrics = ServerMetrics()
    app.state.bodies = BodyBudget(config.max_held_body_bytes)
    app.state.parsed_bodies = BodyBudget(config.max_held_body_bytes)
    app.state.reading = FairGate(READING_AT_ONCE)
    app.state.quotas = quotas = Quotas(store, config)
    app.state.presence = Presence(until_idle_s=config.until_idle_s, parent_pid=config.parent_pid)
    app.state.auth = auth = Auth.open(
        store,
        config.api_keys,
        secret=secret(store, data_dir, "jwt"),
        key_required=config.key_required,
    )
    app.state.shelf = shelf = Shelf(store, data_dir, _open_depot(config))
    app.state.signer = Signer(secret(store, data_dir, "links"))
    app.state.service = service = Service(config, store, shelf, pool, auth.user_of, quotas)
    app.state.administration = administration = Administration(service, auth, quotas)
    app.state.failed_logins = FailedLogins(administration.note_knocking)
    # Routes are matched in this order: what is called most stands first.
    for router in (*_OURS, *(module.router for module in REST)):
        app.include_router(router)
    compat.install(app, service)
    console.install(app)
    problems.install(app, in_their_words)
    openapi.install(app)
    app.open_door()
    return app


def _open_depot(config: ServerConfig) -> Depot | None:
    if config.storage:
        return Depot.open(config.storage, config.data_dir, config.storage_cache_bytes)
    refuse_without(config.data_dir)
    return None


class Application(FastAPI):
    """FastAPI behind a door of ours, and a short way to hot routes.

    The door asks who is there before a body is read, measures every request, and notes that
    somebody is there. Matching fifty routes and resolving dependencies costs more than most
    requests do. The routes of `_OURS` all take (request, user), so a table from path to function
    does the same for them.
    """

    def open_door(self) -> None:
        """Once `state` has all that a request needs."""
        self.metrics: ServerMetrics = self.state.metrics
        self.presence: Presence = self.state.presence
        self.bodies: BodyBudget = self.state.bodies
        self.log_access: bool = self.state.config.access_log
        self._hot = _hot_routes()
        self._foreign = compat.endpoints()
        self._turns = FairGate(MAX_SUBMITTING)
        self._max_body_bytes: int = self.state.config.max_body_bytes
        self._failed_logins: FailedLogins = self.state.failed_logins
        self._auth: Auth = self.state.auth
        self._quotas: Quotas = self.state.quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        is_post = scope["method"] == "POST"
        hot = self._hot.get(scope["path"]) if is_post else None
        foreign = self._foreign.get(scope["path"]) if is_post else None
        with _Visit(self, scope, send, is_known=bool(hot or foreign)) as visit:
            if hot is None:
                if foreign is not None:
                    await self._answer_foreign(foreign, scope, receive, visit.send)
                else:
                    await self._enter(scope, receive, visit.send)
                return
            request = Request(scope, receive)
            try:
                user = await self._let_in(scope)
                async with await self._turn(request, user):
                    response = await hot(request, user)
            except Exception as exc:
                response = problems.response_for(self._put_off(exc, scope))
                if response.status_code in (401, 413):
                    response.headers["Connection"] = "close"  # what it goes on sending is not read
            if not isinstance(response, Answer):
                await response(scope, receive, visit.send)
                return
            if (hold := scope.get(HOLD_HEAD)) is not None:
                hold()
            await send(visit.head(response))
            await send({"type": "http.response.body", "body": response.body})

    async def _let_in(self, scope: Scope) -> User:
        """Who calls, if they may go on."""
        self._check_local(scope)
        key = headers_of(scope).get(b"x-api-key")
        user = await self._auth.user_of(None if key is None else key.decode("latin-1"))
        await self._admit(user, scope)
        return user

    async def _turn(self, request: Request, user: User) -> AbstractAsyncContextManager[None]:
        """A place among the large bodies, for a request that has one."""
        if request.scope["path"] not in _SUBMITS:
            return _NO_TURN
        size = len(await receive_body(request))  # a slow sender must not hold a turn
        return self._turns.place(user.user_id, size + SUBMIT_COST)

    def _check_local(self, scope: Scope) -> None:
        if self._auth.is_open:
            check_local(scope["headers"])

    async def _admit(self, user: User, scope: Scope) -> None:
        """Refuse what the user has enough of, and new things while the disk is nearly full."""
        scope["tinkex.user"] = user.user_id
        self._quotas.note(user)
        self._quotas.spend(user)
        if scope["method"] == "POST":
            if scope["path"] in _STORES:
                self.state.service.room.require()
            if scope["path"] in LIMITED_PATHS:
                await self._quotas.require(user.user_id, scope["path"])

    def _put_off(self, exc: Exception, scope: Scope) -> Exception:
        """A caller whose key is unknown, again and again, is asked to wait."""
        return self._failed_logins.put_off(exc, scope["client"][0] if scope.get("client") else "")

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The long way, which reads bodies before it asks who is there; so we ask first."""
        try:
            self._check_local(scope)
            if is_foreign(scope["path"]):
                await self._admit(await foreign_user(Request(scope)), scope)
            elif scope["path"] == "/metrics":
                await foreign_sees_users(Request(scope))
            elif scope["path"] in _FOR_OPERATORS:
                await foreign_user(Request(scope))
            elif _needs_key(scope["path"]):
                await self._admit(await current_user(Request(scope)), scope)
            receive = _limited(scope, receive, self._max_body_bytes)
        except Exception as exc:
            response = problems.response_for(self._put_off(exc, scope))
            response.headers["Connection"] = "close"  # what it goes on sending is not read
            await in_their_words(scope["path"], response)(scope, receive, send)
            return
        await super().__call__(scope, receive, send)

    async def _answer_foreign(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """The short way to what OpenAI's and Anthropic's clients post to."""
        path, is_admitted = scope["path"], False
        try:
            self._check_local(scope)
            user = await foreign_user(Request(scope))
            await self._admit(user, scope)
            receive = _limited(scope, receive, self._max_body_bytes)
            is_admitted = True
            response = await endpoint(Request(scope, receive), user)
        except Exception as exc:
            ours = problems.response_for(self._put_off(exc, scope))
            response = in_their_words(path, ours)
            if not is_admitted:
                response.headers["Connection"] = "close"  # what it goes on sending is not read
        await response(scope, receive, send)


class _Visit:
    """`with`: one request, from the door to the end of its answer."""

    def __init__(self, app: Application, scope: Scope, send: Send, *, is_known: bool) -> None:
        """`is_known`: the path has no ids in it, so metrics and log may call the route by it."""
        self._app, self._scope, self._send, self._is_known = app, scope, send, is_known
        self._status = 500
        self._request_id = _request_id(headers_of(scope))
        self._started = time.perf_counter()

    def __enter__(self) -> _Visit:
        answering.set(self._request_id)
        self._app.presence.request_started()
        return self

    async def send(self, message: Message) -> None:
        """Send a piece of the answer; the first one names the request."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message["headers"], self._id_header]
        await self._send(message)

    def head(self, answer: Answer) -> Message:
        """What `send` makes of the first piece, of an answer that is all there."""
        self._status = answer.status_code
        headers = [*answer.raw_headers, self._id_header]
        return {"type": "http.response.start", "status": self._status, "headers": headers}

    @property
    def _id_header(self) -> tuple[bytes, bytes]:
        return (b"x-request-id", self._request_id.encode())

    def __exit__(self, *_: object) -> None:
        scope, app = self._scope, self._app
        let_go(scope, app.bodies)
        app.presence.request_ended()
        found = getattr(scope.get("route"), "path", "unknown")
        route = scope["path"] if self._is_known else found
        spent_s = time.perf_counter() - self._started
        app.metrics.observe(route, self._status, spent_s, scope.get("tinkex.user") or "")
        if app.log_access:
            _log(scope, route, self._request_id, self._status, spent_s)


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """The caller's, when it is plain and short; else a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and _is_plain(given):
        return given.decode()
    return f"{_ids.getrandbits(64):016x}"  # it names, and proves nothing


def _is_plain(given: bytes) -> bool:
    return 0 < len(given) <= 64 and given.replace(b"-", b"").isalnum()


def _log(scope: Scope, route: str, request_id: str, status: int, spent_s: float) -> None:
    """One line of JSON a request, without queries and bodies: they may hold what is private."""
    line = {
        "at": round(time.time(), 3),
        "request_id": request_id,
        "address": scope["client"][0] if scope.get("client") else None,
        "user": scope.get("tinkex.user"),
        "method": scope["method"],
        "route": route,
        "status": status,
        "seconds": round(spent_s, 6),
    }
    access_logger.info("%s", orjson.dumps(line).decode())


def _needs_key(path: str) -> bool:
    """All but what operators look at, and downloads, whose link is the permission."""
    return path.startswith(("/api/", "/tinkex/")) and not path.startswith(_WITHOUT_KEY)


def _limited(scope: Scope, receive: Receive, max_body_bytes: int) -> Receive:
    """`receive` that refuses a body beyond the limit of its route."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").decode("latin-1")
    limit = body_limit(scope["path"], kind, max_body_bytes)
    text = f"The body exceeds the {limit} bytes that this route takes."
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit() or len(declared) > 19 or int(declared) > limit:
        raise problems.ApiError(413, text)
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise HTTPException(413, text, headers={"Connection": "close"})
        return message

    return bounded


def _hot_routes() -> dict[str, Endpoint]:
    """Only those that any user may call: nobody asks here whether the caller is an administrator.

    A route that needs one goes the long way, where FastAPI resolves what it declares.
    """
    found: dict[str, Endpoint] = {}
    for router in _OURS:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.methods == {"POST"}:
                declared = inspect.signature(route.endpoint, eval_str=True).parameters
                if declared["user"].annotation == CurrentUser:
                    found[route.path] = route.endpoint
    return found
