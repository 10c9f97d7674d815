"""The one way in: who calls, may they, how large is it; then the table of handlers.

Every request is asked the same in the same order, before a byte of its body is read: the key, then
quotas and room on the disk, then the size of the body. Then a handler answers it: those that are
called most, and the endpoints of foreign APIs, by a table from path to function; all others by
FastAPI's routes. Matching fifty routes and resolving dependencies costs more than most requests do.
The door also measures every request and notes that somebody is there.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

import orjson
from fastapi import FastAPI, Request, Response
from starlette.types import Message, Receive, Scope, Send

from tinkex.contract.cost import LARGE
from tinkex.server.compat.refusals import in_their_words
from tinkex.server.fairness.gate import FairGate
from tinkex.server.guard.auth import CALLER, USER_ID, Identity
from tinkex.server.guard.callers import foreign_credential, is_foreign, own_credential
from tinkex.server.guard.connections import HOLD_HEAD, PIECE_BYTES
from tinkex.server.guard.origin import check_host, check_local
from tinkex.server.http.bodies import (
    PAGE_BYTES,
    count_answer,
    headers_of,
    let_go,
    limited,
    receive_body,
    reserve_answer,
)
from tinkex.server.http.dependencies import AppDependencies
from tinkex.server.http.handlers import Answer
from tinkex.server.process import problems
from tinkex.server.process.logs import answering
from tinkex.server.process.problems import ApiError
from tinkex.store import User
from tinkex.wire.endpoints import ENDPOINTS

access_logger = logging.getLogger("tinkex.access")
# A burst of thousands of these must not stand between a heartbeat and its answer.
_SUBMITS = frozenset(
    row.path
    for row in ENDPOINTS.values()
    if row.limit.sent_bytes == LARGE.sent_bytes or row.name == "asample"
)
# Calls that take room on the disk; polls, heartbeats and deletions go on when it is nearly full.
_STORES = frozenset(
    ENDPOINTS[name].path
    for name in (
        "create_session",
        "create_sampling_session",
        "create_custom_loss",
        "asample",
        "asample_batch",
        "import_checkpoint",
        "copy_weights",
        "log_metrics",
        "external_weights_upload_start",
        "external_weights_upload_finish",
    )
)
# Descriptions of runs are kept too: on a full disk thousands of them would fill what was made free.
_OUR_RUNS = "/tinkex/v1/runs/"
# Calls that free some of it, and so may use the reserve; every DELETE is another.
_FREES = frozenset({ENDPOINTS["unload_model"].path})
_ADMIN = "/tinkex/v1/admin/"
MAX_SUBMITTING = 32
SUBMIT_COST = 4096
"""What a request costs beside the bytes of its body, in bytes."""
_NEED_KEY = ("/api/", "/tinkex/")
# A probe of its health needs no key, and the link of a download or an upload is its permission.
_WITHOUT_KEY = ("/api/v1/healthz", "/api/v1/signed/", "/api/v1/uploads/")
_METRICS = "/metrics"
# Probes come by address, not by name, and are told no links.
_PROBES = frozenset({"/api/v1/healthz", "/readyz", _METRICS})
# For whoever has a key; the metrics have a role of their own.
_FOR_OPERATORS = frozenset({_METRICS, "/docs", "/redoc", "/openapi.json"})
Endpoint = Callable[[Request, User], Awaitable[Response]]
_ids = random.Random()
_NO_TURN = nullcontext()


class Door(FastAPI):
    """FastAPI's application behind the door."""

    def open(self, dependencies: AppDependencies, endpoints: Mapping[str, Endpoint]) -> None:
        """Let requests in. `endpoints` are handlers of POST requests by their paths."""
        self.state.dependencies = self._dependencies = dependencies
        self._auth = dependencies.auth
        self._quotas = dependencies.quotas
        config = dependencies.config
        self._max_bytes = (config.max_body_bytes, config.max_upload_bytes)
        self._public_url = config.public_url
        self._endpoints = dict(endpoints)
        self._turns = FairGate(MAX_SUBMITTING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        with _Visit(self._dependencies, scope, send, is_known=endpoint is not None) as visit:
            try:
                user = await self._let_in(scope)
                receive = limited(scope, receive, *self._max_bytes)
            except Exception as exc:
                # A client over its rate keeps its connection where it calls often; elsewhere the
                # connection ends, so that the rest of a refused body is never read.
                stays = endpoint is not None and not is_foreign(scope["path"])
                response = self._refusal(exc, scope, closes=not stays)
                await response(scope, receive, visit.send)
                return
            request = Request(scope, receive)
            if endpoint is None:
                await self._route(request, visit)
                return
            assert user is not None, scope["path"]  # every path of the table needs a key
            try:
                async with await self._turn(request, user):
                    response = await endpoint(request, user)
            except Exception as exc:
                response = self._refusal(exc, scope)
            if not isinstance(response, Answer):
                await response(scope, receive, visit.send)
                return
            if (hold := scope.get(HOLD_HEAD)) is not None:
                hold()
            await send(visit.head(response))
            write = visit.send if len(response.body) > PIECE_BYTES else send
            await write({"type": "http.response.body", "body": response.body})

    async def _route(self, request: Request, visit: _Visit) -> None:
        """Let FastAPI answer; there is room for a page of a listing before it is made."""
        try:
            if USER_ID in request.scope:
                await reserve_answer(request, PAGE_BYTES)
        except ApiError as exc:
            await self._refusal(exc, request.scope)(request.scope, request.receive, visit.send)
            return
        await super().__call__(request.scope, request.receive, visit.send)

    async def _let_in(self, scope: Scope) -> User | None:
        """Ask who calls and whether they may go on; None where no key is needed.

        Raises:
            ApiError: 401 without a valid key, 403 for one that is not enough or a web page, 429 or
                507 for a caller who has enough, or a disk that is nearly full.
        """
        if self._auth.is_open:
            check_local(scope["headers"])
        path, headers = scope["path"], headers_of(scope)
        if self._public_url and path not in _PROBES:
            check_host(headers.get(b"host", b"").decode("latin-1"), self._public_url)
        if path.startswith(_NEED_KEY):
            if path.startswith(_WITHOUT_KEY):
                return None
            caller = await self._auth.identity_of(own_credential(headers))
        elif is_foreign(path) or path in _FOR_OPERATORS:
            credential = foreign_credential(headers, is_open=self._auth.is_open)
            is_metrics = path == _METRICS
            caller = await self._auth.identity_of(credential, for_metrics=is_metrics)
        else:
            return None  # the console asks by itself: its visitors have a cookie
        scope[CALLER] = caller
        if path not in _FOR_OPERATORS:  # these are nobody's work and count against no rate
            self._admit(caller, scope)
        return caller.user

    def _admit(self, caller: Identity, scope: Scope) -> None:
        """Refuse what the user has enough of, and new things while the disk is nearly full."""
        user, method = caller.user, scope["method"]
        scope[USER_ID] = user.user_id
        self._quotas.note(user)
        self._quotas.spend(user)
        path, room = scope["path"], self._dependencies.service.room
        if (method == "POST" and path in _STORES) or (
            method == "PUT" and path.startswith(_OUR_RUNS)
        ):
            room.require()
        frees, is_admin = method == "DELETE" or path in _FREES, caller.role == "admin"
        if frees or (is_admin and path.startswith(_ADMIN) and method != "GET"):
            room.make_way(is_admin=is_admin)

    async def _turn(self, request: Request, user: User) -> AbstractAsyncContextManager[None]:
        """A turn among the large bodies, for a request that has one."""
        if request.scope["path"] not in _SUBMITS:
            return _NO_TURN
        size = len(await receive_body(request))  # a slow sender must not hold a turn
        return self._turns.slot(user.user_id, size + SUBMIT_COST)

    def _refusal(self, exc: Exception, scope: Scope, *, closes: bool = False) -> Response:
        """The answer to a request that failed, in the words of the API that was called."""
        address = scope["client"][0] if scope.get("client") else ""
        # A caller whose key is unknown, again and again, is asked to wait.
        ours = problems.response_for(self._dependencies.failed_logins.put_off(exc, address))
        response = in_their_words(scope["path"], ours)
        if closes or response.status_code in (401, 413):
            response.headers["Connection"] = "close"
        return response


class _Visit:
    """`with`: one request, from the door to the end of its answer."""

    def __init__(
        self, dependencies: AppDependencies, scope: Scope, send: Send, *, is_known: bool
    ) -> None:
        """`is_known`: the path has no ids in it, so metrics and log may call the route by it."""
        self._dependencies, self._scope, self._send = dependencies, scope, send
        self._is_known = is_known
        self._status = 500
        self._request_id = _request_id(headers_of(scope))
        self._started = time.perf_counter()

    def __enter__(self) -> _Visit:
        answering.set(self._request_id)
        self._dependencies.presence.request_started()
        return self

    async def send(self, message: Message) -> None:
        """Send a piece of the answer; the first one names the request."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message["headers"], self._id_header]
        elif len(message.get("body", b"")) > PIECE_BYTES:
            message = await self._send_pieces(message)
        await self._send(message)

    async def _send_pieces(self, message: Message) -> Message:
        """Send the body of an answer as fast as it is read; gives the last piece, to be sent.

        A connection keeps whatever it is given until that is read, and nobody counts it there.
        """
        body = memoryview(message["body"])
        count_answer(self._scope, self._dependencies.bodies, len(body))
        last = (len(body) - 1) // PIECE_BYTES * PIECE_BYTES
        for start in range(0, last, PIECE_BYTES):
            piece = bytes(body[start : start + PIECE_BYTES])
            await self._send({"type": message["type"], "body": piece, "more_body": True})
        return {**message, "body": bytes(body[last:])}

    def head(self, answer: Answer) -> Message:
        """The first piece of an answer that is all there, as `send` would send it."""
        self._status = answer.status_code
        headers = [*answer.raw_headers, self._id_header]
        return {"type": "http.response.start", "status": self._status, "headers": headers}

    @property
    def _id_header(self) -> tuple[bytes, bytes]:
        return (b"x-request-id", self._request_id.encode())

    def __exit__(self, *_: object) -> None:
        scope, dependencies = self._scope, self._dependencies
        let_go(scope, dependencies.bodies)
        dependencies.presence.request_ended()
        matched = getattr(scope.get("route"), "path", "unknown")
        route = scope["path"] if self._is_known else matched
        spent_s = time.perf_counter() - self._started
        user_id = scope.get(USER_ID) or ""
        dependencies.metrics.observe(route, self._status, spent_s, user_id)
        if self._status == 429 and user_id:
            dependencies.service.timelines.refused(user_id, route, time.time())
        if dependencies.config.access_log:
            _log(scope, route, self._request_id, self._status, spent_s)


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """The caller's own id, when it is plain and short; else a new one."""
    sent = headers.get(b"x-request-id")
    if sent is not None and _is_plain(sent):
        return sent.decode()
    return f"{_ids.getrandbits(64):016x}"  # it names, and proves nothing


def _is_plain(sent: bytes) -> bool:
    return 0 < len(sent) <= 64 and sent.replace(b"-", b"").isalnum()


def _log(scope: Scope, route: str, request_id: str, status: int, spent_s: float) -> None:
    """Write one line of JSON, without queries and bodies: they may hold what is private."""
    line = {
        "at": round(time.time(), 3),
        "request_id": request_id,
        "address": scope["client"][0] if scope.get("client") else None,
        "user": scope.get(USER_ID),
        "method": scope["method"],
        "route": route,
        "status": status,
        "seconds": round(spent_s, 6),
    }
    access_logger.info("%s", orjson.dumps(line).decode())
