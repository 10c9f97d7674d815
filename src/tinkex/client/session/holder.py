"""The inside of a client: one connection to one service, with or without a session.

A holder is built without touching the network. The first call makes it ready, in the contract's
order (3.1): config, auth, dynamic config, session, heartbeat. Everything here runs on the
background loop. It puts the parts together, each of which owns one thing: `Transport` the
connections, `Session` the session, `OpenCalls` what runs, `Budgets` what may be under way,
`Revival` the embedded server. What the calls mean is for the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from tinkex import types
from tinkex.client.config import LOCAL, ClientConfig
from tinkex.client.credentials import TokenProvider
from tinkex.client.futures import APIFuture, Waiting, spawn
from tinkex.client.http.backends import Backend, choose_backend
from tinkex.client.http.call import Call
from tinkex.client.http.headers import CONTRACT_VERSION
from tinkex.client.http.http1 import Reply
from tinkex.client.http.limits import Budgets, RateLimiter
from tinkex.client.http.options import CallLimits, Options
from tinkex.client.http.transport import Transport
from tinkex.client.session.flags import DynamicFlags, ServerFlags
from tinkex.client.session.open_calls import OpenCalls
from tinkex.client.session.polling import Expect, Poller
from tinkex.client.session.revival import Revival
from tinkex.client.session.session import Session
from tinkex.errors import (
    APIResponseValidationError,
    ClientClosedError,
    ConfigError,
    NotFoundError,
    RetryableException,
    TinkerError,
)
from tinkex.wire import requests

if TYPE_CHECKING:
    from tinkex.client.session.telemetry import Reporter

logger = logging.getLogger("tinkex.session")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_MIN_REFRESH_S = 10.0
_NO_LIMITS = CallLimits()


class Holder:
    """`shadow` restores a holder in another process: the session exists already, and the flags are
    those the first holder saw.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        with_session: bool = True,
        shadow: tuple[str, ServerFlags, DynamicFlags] | None = None,
        make_backend: Callable[[ClientConfig], Backend] = choose_backend,
    ) -> None:
        self.config = config
        self.given_config = config
        """As it was asked for: `config` names the embedded server's port once there is one."""
        self._make_backend = make_backend
        self._with_session = with_session
        self.session = Session(shadow[0] if shadow else None)
        self.flags = shadow[1] if shadow else ServerFlags()
        self.dynamic = shadow[2] if shadow else DynamicFlags()
        self.calls = OpenCalls()
        self.reporter: Reporter | None = None
        """The telemetry reporter, once there is one."""
        self.successor: Holder | None = None
        """Where its work goes on, once its session was lost and a run of it rebuilt elsewhere."""
        self.is_closed = False
        self._pid = os.getpid()
        self._starting: asyncio.Future[None] | None = None
        self._starting_within = _NO_LIMITS
        self._ready = False
        self._revival: Revival | None = None
        # Made by the first call:
        self._connected = False
        self.transport: Transport
        self.tokens: TokenProvider
        self.limiter: RateLimiter
        self.budgets: Budgets
        self.poller: Poller
        self._cancelling: asyncio.Semaphore

    @property
    def session_id(self) -> str | None:
        return self.session.id

    @property
    def latest(self) -> Holder:
        """This holder, or the one in which its work goes on by now."""
        holder = self
        while holder.successor is not None:
            holder = holder.successor
        return holder

    @property
    def address(self) -> str:
        """The server to come back to: `local` where it has the runs of the private one.

        Their server is another each time: private, or a `tinkex serve`. Known once the holder is
        ready.
        """
        is_local = self._revival is not None and self._revival.server.has_private_data
        return LOCAL if is_local else self.config.base_url

    # -- starting

    async def ready(self, limits: CallLimits = _NO_LIMITS) -> None:
        """Make the holder usable; all callers wait for the first one's attempt.

        One that failed within the narrower limits of another caller is made again.
        """
        while not self._ready:
            if self.is_closed:
                raise ClientClosedError("The client is closed. Make a new ServiceClient.")
            if self._starting is None:
                self._starting = asyncio.ensure_future(self._start(limits))
                self._starting_within = limits
                # Closing may end all who wait for it; asyncio would complain about the error.
                self._starting.add_done_callback(lambda done: done.cancelled() or done.exception())
            attempt, within = self._starting, self._starting_within
            try:
                await asyncio.shield(attempt)
            except asyncio.CancelledError:
                raise
            except BaseException:
                if self._starting is attempt:
                    self._starting = None
                if within == limits:
                    raise

    async def _start(self, limits: CallLimits) -> None:
        try:
            await self._connect()
            if not self.session.is_shadow:
                await self._fetch_flags(limits)
            self._apply_flags()
            if not self.session.is_shadow:
                await self._fetch_dynamic(window=True, limits=limits)
            if self._with_session and self.session.id is None:
                await self.session.open(self, limits)
        except BaseException:
            if self._connected:
                await self.transport.close()
            raise
        self._ready = True
        self._start_tasks()

    async def _connect(self) -> None:
        if self.config.base_url == LOCAL:
            from tinkex.client.session.embedded_server import join_local_server

            joined = await asyncio.to_thread(
                join_local_server, model=self.config.model, is_private=self.config.is_private
            )
            self._revival = Revival(joined, self.session)
            server = self._revival.server
            self.config = self.config.replace(base_url=server.base_url, api_key=server.api_key)
        config = self.config
        self.tokens = TokenProvider(config.api_key, config.credential_cmd)
        self.limiter = RateLimiter.of(config.base_url, config.api_key)
        self.transport = Transport(
            config,
            self.tokens,
            limiter=self.limiter,
            make_backend=self._make_backend,
            revive=self._revival,
        )
        self._connected = True

    async def _fetch_flags(self, limits: CallLimits) -> None:
        request = types.ClientConfigRequest(sdk_version=CONTRACT_VERSION)
        call = Call.to("client_config", request, pool="config")
        try:
            reply = await self.transport.call(call.within(limits))
        except NotFoundError:
            logger.info(
                "%s has no /client/config: speaking the old protocol.", self.config.base_url
            )
            self.flags = ServerFlags.for_old_server()
            return
        self.flags = ServerFlags.from_json(reply.json())
        if not self.config.extensions:
            self.flags = self.flags.without_extensions()
        if self.flags.credential_default_source == "credential_cmd":
            self.tokens.require_command()
        if not self.flags.pjwt_auth_enabled and self.config.api_key is None:
            raise ConfigError(
                "This server takes API keys as they are and no tokens, so a credential command "
                "cannot be used with it. Set TINKER_API_KEY."
            )

    def _apply_flags(self) -> None:
        flags = self.flags
        if flags.pjwt_auth_enabled:
            self.tokens.use_exchange(self._exchange_token)
        self.transport.generation = flags.generation
        self.transport.billing.max_pause_s = flags.billing_exception_max_pause_duration_sec
        self.budgets = Budgets(
            self.limiter,
            sample_bytes=flags.sample_dispatch_bytes_semaphore_size,
            training_bytes=flags.fwdbwd_dispatch_bytes_semaphore_size,
            result_bytes=flags.inflight_response_bytes_semaphore_size,
        )
        self._cancelling = self._cancels_at_once()
        self.poller = Poller(
            self.transport.exchange,
            inflight=self.budgets.results,
            billing=self.transport.billing,
            generation=flags.generation,
        )

    async def _exchange_token(self, credential: str) -> str:
        call = Call.to("exchange_token", requests.NO_FIELDS, pool="auth", window=False)
        # The holder's own transport would ask for a token, which waits for this very exchange.
        exchange = Transport(
            self.config, TokenProvider(credential), make_backend=self._make_backend
        )
        try:
            reply = await exchange.call(call)
        finally:
            await exchange.close()
        token = (reply.json() or {}).get("jwt")
        if not isinstance(token, str) or not token:
            raise APIResponseValidationError("auth/token answered without a 'jwt'.")
        return token

    async def _fetch_dynamic(self, *, window: bool, limits: CallLimits = _NO_LIMITS) -> None:
        if self.flags.old_generation:
            return
        call = Call.to(
            "client_dynamic_config",
            types.ClientConfigRequest(sdk_version=CONTRACT_VERSION),
            pool="session",
            timeout_s=10.0,
            quick_retries=0,
            window=window,
        )
        with contextlib.suppress(NotFoundError):
            reply = await self.transport.call(call.within(limits))
            self.dynamic = DynamicFlags.from_json(reply.json())
            self._cancelling = self._cancels_at_once()

    def _start_tasks(self) -> None:
        begin = self.calls.begin
        if self.session.id is not None:
            begin(self.session.keep_alive(self.transport, self.config.heartbeat_interval_s))
        if self._with_session:
            begin(self._refresh_dynamic())
        if self.flags.pjwt_auth_enabled:
            begin(self.tokens.keep_fresh())
        if self.config.telemetry:
            from tinkex.client.session.telemetry import start_reporter

            self.reporter = start_reporter(self)

    async def _refresh_dynamic(self) -> None:
        while True:
            await asyncio.sleep(max(self.dynamic.refresh_interval_sec, _MIN_REFRESH_S))
            with contextlib.suppress(TinkerError):
                await self._fetch_dynamic(window=False)

    # -- calls

    def spawn(
        self,
        work: Callable[[Waiting], Coroutine[Any, Any, T]],
        limits: CallLimits = _NO_LIMITS,
    ) -> APIFuture[T]:
        """Run `work` on the background loop once the holder is ready.

        The first call makes it so, within its own `limits`.
        """
        if os.getpid() != self._pid:
            raise TinkerError(
                "This client was made before a fork; its connections belong to the parent process. "
                "Make a new ServiceClient here, or hand over a pickled SamplingClient."
            )

        async def run(waiting: Waiting) -> T:
            with self.calls:
                if self.successor is not None:
                    raise self._lost()
                if not self._ready:
                    await self.ready(limits)
                return await work(waiting)

        return spawn(run)

    async def post(
        self,
        path: str,
        request: BaseModel,
        answer: type[M],
        *,
        pool: str = "train",
        window: bool = True,
        quick_retries: int | None = None,
        headers: dict[str, str] | None = None,
        options: Options = None,
        waiting: Waiting | None = None,
    ) -> M:
        """POST a request in the server's dialect and parse the answer."""
        call = Call.to(
            path,
            request,
            self.flags.generation,
            pool=pool,
            quick_retries=quick_retries,
            window=window,
            headers=headers,
        )
        return await self.ask(call.having(options), answer, waiting)

    async def promised(
        self, path: str, request: BaseModel, result: type[T], waiting: Waiting, **settings: Any
    ) -> T:
        """POST a request that is answered with a promise, and wait for what that becomes."""
        promise = await self.post(
            path, request, types.UntypedAPIFuture, waiting=waiting, **settings
        )
        expect = Expect.of(path, result)
        return await self.poller.wait(promise.request_id, expect, waiting=waiting)

    async def ask(self, call: Call, answer: type[M], waiting: Waiting | None = None) -> M:
        """Make the call and parse the answer."""
        return parse(await self.transport.call(call, waiting), answer)

    def cancel_sample(self, request_id: str) -> None:
        """Ask the server, in the background, to stop a sample nobody waits for any more (4.3)."""
        if self.dynamic.sample_cancel_enabled and not self.is_closed:
            self.calls.begin(self._cancel_sample(request_id))

    async def _cancel_sample(self, request_id: str) -> None:
        request = types.CancelFutureRequest(request_id=request_id)
        call = Call.to("cancel_future", request, pool="futures", timeout_s=30.0, quick_retries=0)
        async with self._cancelling:
            try:
                await self.transport.call(call)
            except Exception as exc:  # nobody waits for it, so the log is the only one to tell
                logger.info("Cancelling a sample failed: %s", exc)

    def _cancels_at_once(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(max(self.dynamic.sample_cancel_max_batch_size, 1))

    # -- ending

    def end_if_gone(self, successor: Holder) -> APIFuture[bool]:
        """Its work goes on in `successor`: end the session here, unless the server still knows it.

        A session that still lives may have other clients, and is kept alive for them. One that is
        gone can serve nobody: its calls end, with an error that says where to go on. Gives whether
        it is gone.
        """

        async def look(waiting: Waiting) -> bool:
            if self.is_closed:  # by its owner, for whom nothing goes on
                return True
            try:
                await self.session.beat(self.transport)
            except TinkerError as exc:
                logger.info("Session %s is left alone from now on: %s", self.session.id, exc)
                self.session.is_over = True
                self.successor = successor
                self.calls.cancel(self._lost)
                return True
            return False

        return spawn(look)

    def _lost(self) -> RetryableException:
        return RetryableException(
            f"Session {self.session.id} was lost with its server, and its training goes on in "
            f"session {self.latest.session_id}. The ServiceClient has moved there: make this "
            "client again from it."
        )

    def _ended(self) -> Exception:
        if self.successor is not None:
            return self._lost()
        return ClientClosedError("The client was closed while this call waited.")

    async def close(self, status: str | None = None, detail: str | None = None) -> None:
        """Finish the session with a reason, stop all tasks, close the connections."""
        if self.is_closed:
            return
        was_ready, self.is_closed, self._ready = self._ready, True, False
        if self._revival is not None:
            self._revival.is_over = True
        try:
            if was_ready and status is not None:
                embedded = self._revival is not None
                await self.session.finish(self.transport, status, detail, is_embedded=embedded)
            if self.reporter is not None:
                await self.reporter.drain()
        finally:
            await self.calls.close(self._ended)
            if self._connected:
                await self.transport.close()
            if self._revival is not None:
                await self._revival.server.leave()


def parse(reply: Reply, answer: type[M]) -> M:
    """Read a JSON answer into its model; anything else is a validation error."""
    try:
        return answer.model_validate_json(reply.content)
    except ValidationError as exc:
        raise APIResponseValidationError(
            f"The server's answer is not a {answer.__name__}: {exc.error_count()} problems, first: "
            f"{exc.errors()[0]['msg']} at {exc.errors()[0]['loc']}.",
            body=reply.content[:2000],
        ) from exc


# Session-less holders are shared: one per service and account.
_shared: weakref.WeakValueDictionary[tuple[str, str | None], Holder] = weakref.WeakValueDictionary()


def shared_holder(config: ClientConfig) -> Holder:
    """The process's session-less holder for this service and account."""
    # Without a server named, a `tinkex serve` may be joined; `local` is always the private one.
    server = f"{config.base_url} {config.is_private}"
    key = (server, hashlib.sha256((config.api_key or "").encode()).hexdigest())
    holder = _shared.get(key)
    if holder is None or holder.is_closed:
        holder = _shared[key] = Holder(config, with_session=False)
    return holder
