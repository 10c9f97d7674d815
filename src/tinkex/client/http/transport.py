"""One HTTP exchange, and one call made of a few of them.

Pools are kept apart: session, train, sample, futures, poller, telemetry and redirect each have
their own connections, so a burst of sampling never delays a heartbeat (R10). `exchange` makes one
try and returns whatever the server answered; `call` repeats it as `retry.py` decides and raises an
error of our tree for a failure. Which body a call carries, and what an answer means, is for the
callers.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit

import httpx
import orjson

from tinkex import events
from tinkex.client.background_loop import loop_time
from tinkex.client.config import LOCAL_KEY, ClientConfig
from tinkex.client.credentials import TokenProvider
from tinkex.client.futures import Waiting
from tinkex.client.http.backends import Backend, TlsError, choose_backend, make_httpx
from tinkex.client.http.breaker import CircuitBreaker
from tinkex.client.http.call import Call, status_error
from tinkex.client.http.headers import idempotency_key, put, standard_headers
from tinkex.client.http.http1 import NoAnswerError, NoConnectionError, ProtocolError, Reply
from tinkex.client.http.limits import RateLimiter
from tinkex.client.http.retry import (
    BillingPause,
    CallRetry,
    Outage,
    RetryPolicy,
    says_no_retry,
)
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    ClientClosedError,
    RateLimitError,
)
from tinkex.wire.generation import JSON, Generation

logger = logging.getLogger("tinkex.http")

_EMPTY_400_BUDGET = 16
# What a rate limit holds back. Heartbeats and polls make nobody's queue longer.
_HELD_POOLS = frozenset({"train", "sample"})
_MAX_REDIRECTS = 5
# Ids and names go into paths as they are; only what a request line cannot hold is encoded.
_SAFE = "/:@!$&'()*+,;=-._~%"
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/:@!$&'()*+,;=._~%\-]*")
_ARCHIVE_TRIES = 7
_ARCHIVE_PAUSE_S = 30.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class _Pool:
    """The connections of one kind of call."""

    def __init__(self, make_backend: Callable[[], Backend]) -> None:
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._torn: list[Backend] = []
        self._budget = _EMPTY_400_BUDGET

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            self._backend = self._make_backend()
        return self._backend

    def refuse_torn(self, reply: Reply) -> None:
        """A 400 without a body is a connection torn down by a proxy, not an answer (1.6)."""
        if reply.ok:
            self._budget = min(self._budget + 1, _EMPTY_400_BUDGET)
        elif reply.status == 400 and not reply.content and self._budget > 0:
            self._budget -= 1
            # Not closed yet: other calls may still wait on its connections.
            self._torn += [self._backend] if self._backend is not None else []
            self._backend = None
            raise APIConnectionError(
                "The server sent a 400 without a body, the sign of a torn connection."
            )

    async def close(self) -> None:
        backends = [*self._torn, *([self._backend] if self._backend is not None else [])]
        self._torn, self._backend = [], None
        for backend in backends:
            await backend.close()


class Transport:
    """The HTTP side of one holder. Lives on the background loop."""

    def __init__(
        self,
        config: ClientConfig,
        tokens: TokenProvider,
        *,
        retry: RetryPolicy | None = None,
        limiter: RateLimiter | None = None,
        make_backend: Callable[[ClientConfig], Backend] = choose_backend,
        revive: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.config = config
        self._revive = revive  # brings a server back that nobody else would; True when it lives
        self._make_backend = make_backend
        self._limiter = limiter
        self.tokens = tokens
        self._retry = retry or RetryPolicy(
            max_retries=config.max_retries, window_s=config.retry_window_s
        )
        self._has_answered = False
        self.billing = BillingPause()
        """Shared by all calls and polls: the patience is the account's."""
        self._outage = Outage(config.base_url)
        self._refusals = Outage(config.base_url)
        self._pools: dict[str, _Pool] = {}
        self._standard = {**standard_headers()}
        self._root = f"{config.base_url}/api/v1/"
        self._origin = urlsplit(config.base_url)[:2]
        self._breaker = (
            CircuitBreaker(self._origin[1], clock=loop_time) if config.circuit_breaker else None
        )
        self.generation = Generation.V0_36
        """How request bodies are written; another one once the server is known to be old."""
        self._closed = False
        self._deprecations: set[str] = set()

    # -- calls

    async def call(self, call: Call, waiting: Waiting | None = None) -> Reply:
        """Make the call, repeated as `CallRetry` decides; returns a 2xx answer.

        Raises:
            APIStatusError: The final answer was an error.
            APIConnectionError: There was no final answer.
        """
        retry = CallRetry(
            self._retry,
            self.billing,
            max_retries=call.max_retries,
            quick_retries=call.quick_retries,
            window=call.window,
            waits_itself=call.waits_itself,
        )
        # The official SDK takes another key in each window retry (contract 1.4). Ours stays, and
        # every repeat is the same request to a server that goes by the key.
        key = call.idempotency_key or (idempotency_key() if call.method != "GET" else None)
        was_refused = False
        while True:
            error: APIStatusError | APIConnectionError
            try:
                reply = await self.exchange(call, attempt=retry.attempt, key=key)
            except APIConnectionError as exc:
                error = exc
            else:
                if reply.ok:
                    if was_refused:
                        self._refusals.over()
                    return reply
                error = status_error(call, reply, has_key=self.config.api_key != LOCAL_KEY)
            # A server that nobody has seen yet may be starting, or not be there at all.
            is_unseen = not self._has_answered and _found_nobody(error)
            within_s = self.config.startup_window_s if is_unseen else math.inf
            delay_s = retry.delay_s(error, within_s=within_s)
            if delay_s is None:
                raise error
            if isinstance(error, APIStatusError) and not isinstance(error, BillingError):
                was_refused = True  # a pause for billing has words of its own
                self._refusals.failed(error)
            if isinstance(error, RateLimitError) and self._limiter is not None:
                # The account is over its limit: all clients of this process that share it wait.
                self._limiter.hold(delay_s)
            if waiting is not None:
                billed = isinstance(error, BillingError)
                what = f"retrying after {type(error).__name__}"
                waiting.reason = "paused: billing" if billed else what
            events.emit(
                "http.retry",
                method=call.method,
                path=call.path,
                attempt=retry.attempt,
                delay_s=delay_s,
                reason=str(error),
            )
            await asyncio.sleep(delay_s)

    async def exchange(
        self, call: Call, *, attempt: int = 0, key: str | None = None, follow: bool = True
    ) -> Reply:
        """Send the call once. Any status is an answer; no answer is an APIConnectionError.

        What happens to it, in this order: it waits while the account is held back, it is refused
        while the circuit is open, it is sent, and sent once more if the embedded server was dead
        and could be brought back.
        """
        if self._closed and call.pool != "telemetry":
            raise ClientClosedError("The client is closed. Make a new ServiceClient.")
        if self._limiter is not None and call.pool in _HELD_POOLS:
            await self._limiter.wait()
        timeout_s = call.timeout_s or self.config.timeout_s
        headers = await self._headers(call, attempt, key, timeout_s)
        content = None if call.body is None else call.body.content
        pool, url, revive = self._pool(call.pool), self._url(call), self._revive
        # After the headers, which may fail (a credential command): the trial call of a half-open
        # circuit that never reported its end would keep the circuit open for ever.
        if self._breaker is not None:
            self._breaker.before_call()
        with events.span("http.request", method=call.method, path=call.path, attempt=attempt) as s:
            while True:
                try:
                    with _Try(self, call, timeout_s) as tried:
                        reply = await pool.backend.send(
                            call.method, url, headers, content, timeout_s
                        )
                        if follow and reply.status in _REDIRECTS:
                            reply = await self._follow(pool, call, url, reply, headers, timeout_s)
                        self._has_answered = True
                        pool.refuse_torn(reply)
                        tried.has_answer = reply.status < 500
                    break
                except APIConnectionError as exc:
                    is_slow = isinstance(exc, APITimeoutError)  # then it is there
                    if is_slow or revive is None or not await revive():
                        raise
                    revive = None  # once
            s.add(status_code=reply.status)
        self._note_deprecation(reply)
        self._outage.over()
        return reply

    async def _follow(
        self,
        pool: _Pool,
        call: Call,
        url: str,
        reply: Reply,
        headers: dict[str, str],
        timeout_s: float,
    ) -> Reply:
        """Follow redirects; another host never sees the credential."""
        method, body = call.method, None if call.body is None else call.body.content
        for _ in range(_MAX_REDIRECTS):
            target = reply.headers.get("location")
            if reply.status not in _REDIRECTS or not target:
                return reply
            url, origin = _redirected(url, target)
            if reply.status == 303 or (reply.status in (301, 302) and method == "POST"):
                method, body = "GET", None
            if origin == self._origin:
                reply = await pool.backend.send(method, url, headers, body, timeout_s)
                continue
            headers = {"Accept": headers["Accept"], "User-Agent": headers["User-Agent"]}
            elsewhere = self._make_backend(self.config.replace(base_url=url))
            try:
                reply = await elsewhere.send(method, url, headers, body, timeout_s)
            finally:
                await elsewhere.close()
        raise APIConnectionError(f"More than {_MAX_REDIRECTS} redirects from {call.path}.")

    async def archive(self, call: Call) -> Reply:
        """A redirect answer turned into `{"url", "expires"}` instead of being followed."""
        asked = self.config.max_retries if call.max_retries is None else call.max_retries
        most = _ARCHIVE_TRIES if asked is None else asked + 1
        for number in range(1, most + 1):
            reply = await self.exchange(call, follow=False)
            if reply.status != 503 or number == most or says_no_retry(reply.headers):
                break
            # The server is still building it, and may know for how long.
            await asyncio.sleep(self._retry.asked_s(reply.headers) or _ARCHIVE_PAUSE_S)
        if reply.status in _REDIRECTS:
            body = {"url": reply.headers.get("location"), "expires": reply.headers.get("expires")}
            body["expires"] = _iso_date(body["expires"])
            return Reply(200, {}, orjson.dumps(body))
        if not reply.ok:
            raise status_error(call, reply)
        return reply

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a server-sent-event answer."""
        timeout_s = call.timeout_s or self.config.timeout_s
        headers = await self._headers(call, 0, None, timeout_s)
        headers["Accept"] = "text/event-stream"
        content = None if call.body is None else call.body.content
        name = f"{call.method} {call.path}"
        try:
            async with (
                make_httpx(self.config) as client,
                client.stream(
                    call.method,
                    self._url(call),
                    headers=headers,
                    content=content,
                    timeout=timeout_s,
                ) as answer,
            ):
                if answer.status_code >= 400:
                    content = await answer.aread()
                    raise status_error(call, Reply(answer.status_code, answer.headers, content))
                yield answer.aiter_lines()
        except httpx.TimeoutException as exc:
            raise APITimeoutError(f"The stream of {name} stalled.", name) from exc
        except httpx.HTTPError as exc:
            raise APIConnectionError(f"The stream of {name} broke: {exc}", name) from exc

    # -- pieces

    def _pool(self, name: str) -> _Pool:
        pool = self._pools.get(name)
        if pool is None:
            most = self.config.pool_connections.get(name, self.config.max_connections)
            config = self.config.replace(max_connections=most)
            pool = self._pools[name] = _Pool(lambda: self._make_backend(config))
        return pool

    def _url(self, call: Call) -> str:
        query = _query(call.query) if call.query else ""
        path = call.path if _PLAIN_PATH.fullmatch(call.path) else quote(call.path, safe=_SAFE)
        root = self.config.base_url if path.startswith("/") else self._root
        return f"{root}{path}{query}"

    async def _headers(
        self, call: Call, attempt: int, key: str | None, timeout_s: float
    ) -> dict[str, str]:
        headers = dict(self._standard)
        key = key or call.idempotency_key
        if call.method != "GET":
            headers["Content-Type"] = JSON if call.body is None else call.body.content_type
            key = key or idempotency_key()
        if key is not None:
            headers["X-Idempotency-Key"] = key
        headers["X-API-Key"] = await self.tokens.token()
        headers["x-stainless-retry-count"] = str(attempt)
        headers["x-stainless-read-timeout"] = f"{timeout_s:g}"
        if call.body is not None and call.body.content_encoding is not None:
            headers["Content-Encoding"] = call.body.content_encoding
        put(headers, call.headers or {})
        put(headers, self.config.headers)
        put(headers, call.own_headers or {})
        return headers

    def _note_deprecation(self, reply: Reply) -> None:
        note = reply.headers.get("x-deprecation-note")
        if note and note not in self._deprecations:
            self._deprecations.add(note)
            is_error = reply.headers.get("x-deprecation-level") == "error"
            logger.log(logging.ERROR if is_error else logging.WARNING, "%s", note)

    async def close(self) -> None:
        self._closed = True
        for pool in self._pools.values():
            await pool.close()


class _Try:
    """`with`: one request on the wire. What sockets raise becomes an error of ours, and the breaker
    hears how it went."""

    __slots__ = ("_call", "_timeout_s", "_transport", "has_answer")

    def __init__(self, transport: Transport, call: Call, timeout_s: float) -> None:
        self._transport, self._call, self._timeout_s = transport, call, timeout_s
        self.has_answer = False

    def __enter__(self) -> _Try:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _where: object) -> None:
        breaker, base_url = self._transport._breaker, self._transport.config.base_url
        if breaker is not None:
            if isinstance(exc, asyncio.CancelledError):
                breaker.gave_no_answer()
            else:
                (breaker.succeeded if self.has_answer else breaker.failed)()
        if exc is None or isinstance(exc, APIConnectionError):
            return
        name = self._call.name or f"{self._call.method} {self._call.path}"
        if isinstance(exc, TimeoutError):
            raise APITimeoutError(
                f"{base_url} did not answer {name} within {self._timeout_s:g} s.", name
            ) from exc
        if isinstance(exc, TlsError):
            raise APIConnectionError(f"{exc}", name, category="user") from exc
        if isinstance(exc, OSError):
            is_unseen = not self._transport._has_answered
            may_be_tls = is_unseen and isinstance(exc, NoAnswerError)
            hint = " If it speaks TLS, begin the address with https://." if may_be_tls else ""
            error = APIConnectionError(
                f"No connection to {base_url} for {name}: {exc}. Check that a server runs "
                f"there, the network, and the address (base_url or TINKER_BASE_URL).{hint}",
                name,
            )
            self._transport._outage.failed(error)
            raise error from exc


def _found_nobody(error: APIError) -> bool:
    """Whether nobody was met: no connection could be made, or it was closed without a word."""
    cause = error.__cause__
    if isinstance(cause, ProtocolError):
        return isinstance(cause, NoConnectionError | NoAnswerError)
    return isinstance(cause, OSError) and not isinstance(cause, TimeoutError)


def _redirected(url: str, target: str) -> tuple[str, tuple[str, str]]:
    """Where a redirect leads, and the origin of that."""
    try:
        url = urljoin(url, target)
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url, parts[:2]
    except ValueError:
        pass
    raise APIConnectionError(f"The server redirects to {target[:200]!r}, which is no HTTP address.")


def _iso_date(text: str | None) -> str:
    """An `Expires` header as RFC 3339; a quarter of an hour from now when there is none."""
    if text:
        try:
            return email.utils.parsedate_to_datetime(text).isoformat()
        except (ValueError, OverflowError):
            return text
    return (datetime.now(UTC) + timedelta(minutes=15)).isoformat()


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _query(query: Mapping[str, Any]) -> str:
    """Booleans are `true`/`false`, lists are joined with commas, nulls are dropped (1.1)."""
    flat: dict[str, str] = {}
    for name, value in query.items():
        if isinstance(value, (list, tuple)):
            flat[name] = ",".join(map(_plain, value))
        elif value is not None:
            flat[name] = _plain(value)
    encoded = urlencode({name: value for name, value in flat.items() if value != ""})
    return f"?{encoded}" if encoded else ""
