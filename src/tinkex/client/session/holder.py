"""The inside of a client: connections, credential, session and background tasks.

A holder is built without touching the network. The first call makes it ready, in the contract's
order (3.1): config, auth, dynamic config, session, heartbeat. Everything here runs on the
background loop. It knows how to make a call and keep a session alive; what the calls mean is for
the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from tinkex import events
from tinkex.client.config import LOCAL, ClientConfig
from tinkex.client.futures import APIFuture, Waiting, cancel_all, spawn
from tinkex.client.http.backends import Backend, Reply, choose_backend
from tinkex.client.http.headers import CONTRACT_VERSION
from tinkex.client.http.limits import ByteSemaphore, RateLimiter, SampleGate
from tinkex.client.http.retry import BillingPause, WindowRetry
from tinkex.client.http.transport import Call, Transport
from tinkex.client.polling import Poller
from tinkex.client.session.credentials import TokenProvider
from tinkex.client.session.flags import DynamicFlags, ServerFlags
from tinkex.client.session.loop import loop_time
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    BillingError,
    ClientClosedError,
    ConfigError,
    NotFoundError,
    RateLimitError,
    RetryableException,
    TinkerError,
)
from tinkex.wire import requests

if TYPE_CHECKING:
    from tinkex.client.session.local import LocalServer

__all__ = ["Holder"]

logger = logging.getLogger("tinkex.session")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_HEARTBEAT_WARNING_S = 120.0
_MIN_REFRESH_S = 10.0
_FINISH_TIMEOUT_S = 20.0


class Closable(Protocol):
    """Something with tasks of its own on the background loop."""

    async def close(self) -> None: ...


class Holder:
    """One connection to one service, with or without a session.

    `shadow` restores a holder in another process: the session exists already, and the flags are
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
        self.with_session = with_session
        self.session_id: str | None = shadow[0] if shadow else None
        self.flags = shadow[1] if shadow else ServerFlags()
        self.dynamic = shadow[2] if shadow else DynamicFlags()
        self.is_shadow = shadow is not None
        self._pid = os.getpid()
        self.reporter: Any = None
        """The telemetry reporter, once there is one."""
        self.custom_losses: dict[str, str] = {}
        """Graphs uploaded in this session, by key."""
        self._starting: asyncio.Future[None] | None = None
        self._connected = False
        """Whether `transport` and its companions below exist."""
        self._ready = False
        self._closed = False
        self._session_is_over = False
        """The server ended the session, or is gone: no more heartbeats, and no goodbye."""
        self.successor: Holder | None = None
        """Where its work goes on, once its session was lost and a run of it rebuilt elsewhere."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counters: dict[str, int] = {}
        self._cancels: asyncio.Queue[str] | None = None
        # Weak: a program makes a sampler per step, and each is only closed here if it still lives.
        self._closers: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._calls: set[asyncio.Task[Any]] = set()
        self._ended_by_close: set[asyncio.Task[Any]] = set()
        self._local: LocalServer | None = None
        self._reviving: asyncio.Future[None] | None = None
        self.transport: Transport
        self.tokens: TokenProvider
        self.limiter: RateLimiter
        self.sample_gate: SampleGate
        self.fwdbwd_bytes: ByteSemaphore
        self.inflight_bytes: ByteSemaphore
        self.billing = BillingPause()
        self.poller: Poller
        self.window = WindowRetry(window_s=config.retry_window_s)

    # -- starting

    async def ready(self) -> None:
        """Make the holder usable; all callers wait for the first one's attempt."""
        if self._ready:
            return
        if self._closed:
            raise ClientClosedError("The client is closed. Make a new ServiceClient.")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
            # Closing may end all who wait for it; asyncio would complain about the error.
            self._starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._starting = None
            raise

    async def _start(self) -> None:
        try:
            await self._prepare()
        except BaseException:
            if self._connected:
                await self.transport.close()
            raise

    async def _prepare(self) -> None:
        await self._connect()
        if not self.is_shadow:
            await self._fetch_flags()
        self._set_limits()
        if not self.is_shadow:
            await self._fetch_dynamic(with_retries=True)
        if self.with_session and self.session_id is None:
            await self._create_session()
        self._ready = True
        if self.session_id is not None:
            self._background(self._heartbeat())
        if self.with_session:
            self._background(self._refresh_dynamic())
        if self.flags.pjwt_auth_enabled:
            self._background(self.tokens.keep_fresh())
        self._start_reporter()

    async def _connect(self) -> None:
        if self.config.base_url == LOCAL:
            from tinkex.client.session.local import join_local_server

            self._local = await asyncio.to_thread(join_local_server)
            self.config = self.config.replace(
                base_url=self._local.base_url, api_key=self._local.api_key
            )
        config = self.config
        self.tokens = TokenProvider(config.api_key, config.credential_cmd)
        self.limiter = RateLimiter.of(config.base_url, config.api_key)
        self.transport = Transport(
            config,
            self.tokens,
            limiter=self.limiter,
            make_backend=self._make_backend,
            revive=self._revive if self._local is not None else None,
        )
        self._connected = True

    async def _revive(self) -> bool:
        """The embedded server does not answer: start it again. All who wait share one attempt."""
        if self._closed or self._local is None:
            return False
        if self._reviving is None:
            self._reviving = asyncio.ensure_future(asyncio.to_thread(self._local.revive))
            self._reviving.add_done_callback(self._revived)
        await asyncio.shield(self._reviving)
        return True

    def _revived(self, attempt: asyncio.Future[None]) -> None:
        self._reviving = None
        if not attempt.cancelled() and attempt.exception() is not None:
            self._session_is_over = True  # and whoever waits has the error

    async def _fetch_flags(self) -> None:
        body = orjson.dumps({"sdk_version": CONTRACT_VERSION})
        call = Call(method="POST", path="client/config", pool="config", body=body)
        try:
            reply = await self.execute(call)
        except NotFoundError:
            logger.info(
                "%s has no /client/config: speaking the old protocol.", self.config.base_url
            )
            self.flags = ServerFlags.for_old_server()
            return
        self.flags = ServerFlags.from_json(reply.json())
        if not self.config.extensions:
            self.flags = replace(
                self.flags,
                tinkex_sample_batch=False,
                tinkex_sample_stream=False,
                tinkex_sampling_params="",
            )
        if self.flags.credential_default_source == "credential_cmd":
            self.tokens.require_command()
        if self.flags.pjwt_auth_enabled:
            self.tokens.use_exchange(self._exchange_token)
        elif self.config.api_key is None:
            raise ConfigError(
                "This server takes API keys as they are and no tokens, so a credential command "
                "cannot be used with it. Set TINKER_API_KEY."
            )

    def _set_limits(self) -> None:
        flags = self.flags
        if self.is_shadow and flags.pjwt_auth_enabled:
            self.tokens.use_exchange(self._exchange_token)
        self.billing = BillingPause(flags.billing_exception_max_pause_duration_sec)
        self.sample_gate = SampleGate(self.limiter, flags.sample_dispatch_bytes_semaphore_size)
        self.fwdbwd_bytes = ByteSemaphore(flags.fwdbwd_dispatch_bytes_semaphore_size)
        self.inflight_bytes = ByteSemaphore(flags.inflight_response_bytes_semaphore_size)
        self.poller = Poller(
            self.transport.exchange,
            inflight=self.inflight_bytes,
            billing=self.billing,
            old_generation=flags.old_generation,
        )

    async def _exchange_token(self, credential: str) -> str:
        call = Call(
            method="POST",
            path="auth/token",
            pool="auth",
            body=b"{}",
        )
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

    async def _fetch_dynamic(self, *, with_retries: bool) -> None:
        if self.flags.old_generation:
            return
        call = Call(
            method="POST",
            path="client/dynamic_config",
            pool="session",
            body=orjson.dumps({"sdk_version": CONTRACT_VERSION}),
            timeout_s=10.0,
            max_retries=0,
        )
        try:
            reply = await (self.execute(call) if with_retries else self.transport.call(call))
        except NotFoundError:
            return
        self.dynamic = DynamicFlags.from_json(reply.json())

    async def _create_session(self) -> None:
        from tinkex import types

        config = self.config
        request = types.CreateSessionRequest(
            tags=list(config.tags),
            user_metadata=dict(config.user_metadata),
            sdk_version=CONTRACT_VERSION,
            project_id=config.project_id,
            display_name=config.display_name,
        )
        answer = await self.post(
            "create_session", request, types.CreateSessionResponse, pool="session", window=False
        )
        self.session_id = answer.session_id
        for level, text in (
            (logging.INFO, answer.info_message),
            (logging.WARNING, answer.warning_message),
            (logging.ERROR, answer.error_message),
        ):
            if text:
                logger.log(level, "%s", text)

    def _start_reporter(self) -> None:
        if not self.config.telemetry:
            return
        try:
            from tinkex.client.session.telemetry import start_reporter
        except ImportError:
            return
        self.reporter = start_reporter(self)

    # -- calls

    async def execute(
        self, call: Call, *, window: bool = True, waiting: Waiting | None = None
    ) -> Reply:
        """Make a call with base retries and, with `window`, retries of the whole call (9.2)."""
        if not window:
            return await self.transport.call(call)
        return await self.retried(lambda: self.transport.call(call), waiting)

    async def submit_sample(self, call: Call, waiting: Waiting | None = None) -> Reply:
        """Like `execute`, but 429 and 402 are raised at once: the caller waits on its own terms."""
        return await self.retried(
            lambda: self.transport.call(call), waiting, passing=(RateLimitError, BillingError)
        )

    async def retried(
        self,
        attempt: Callable[[], Awaitable[T]],
        waiting: Waiting | None = None,
        passing: tuple[type[Exception], ...] = (),
    ) -> T:
        started = loop_time()
        num_retries = 0
        while True:
            try:
                return await attempt()
            except passing:
                raise
            except BillingError:
                pause = self.billing.delay_s()
                if pause is None:
                    raise
                delay: float | None = pause
                if waiting is not None:
                    waiting.reason = "paused: billing"
            except Exception as exc:
                if not self.window.wants(exc):
                    raise
                delay = self.window.delay_s(num_retries, loop_time() - started)
                if delay is None:
                    events.emit(
                        "holder.gave_up", error_type=type(exc).__name__, attempt=num_retries
                    )
                    raise
                if waiting is not None:
                    waiting.reason = f"retrying after {type(exc).__name__}"
                num_retries += 1
            assert delay is not None
            await asyncio.sleep(delay)

    async def post(
        self,
        path: str,
        request: BaseModel,
        answer: type[M],
        *,
        pool: str = "train",
        window: bool = True,
        max_retries: int | None = None,
        headers: dict[str, str] | None = None,
        waiting: Waiting | None = None,
    ) -> M:
        """POST a request in the server's dialect and parse the answer."""
        call = Call(
            method="POST",
            path=path,
            pool=pool,
            body=requests.encode(path, request, self.flags.generation).content,
            max_retries=max_retries,
            headers=headers,
        )
        reply = await self.execute(call, window=window, waiting=waiting)
        return parse(reply, answer)

    async def call_json(self, call: Call, answer: type[M]) -> M:
        return parse(await self.execute(call), answer)

    def next_number(self, counter: str) -> int:
        """The next value of one of the session's counters (models, sampling sessions, losses)."""
        number = self._counters.get(counter, 0)
        self._counters[counter] = number + 1
        return number

    def spawn(self, work: Callable[[Waiting], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Run `work` on the background loop once the holder is ready."""
        if os.getpid() != self._pid:
            raise TinkerError(
                "This client was made before a fork; its connections belong to the parent process. "
                "Make a new ServiceClient here, or hand over a pickled SamplingClient."
            )

        async def run(waiting: Waiting) -> T:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                if self.successor is not None:
                    raise self._lost()
                if not self._ready:
                    await self.ready()
                return await work(waiting)
            except asyncio.CancelledError:
                if task in self._ended_by_close:
                    if self.successor is not None:
                        raise self._lost() from None
                    raise ClientClosedError(
                        "The client was closed while this call waited."
                    ) from None
                raise
            finally:
                self._calls.discard(task)

        return spawn(run)

    # -- background

    def _background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _heartbeat(self) -> None:
        """Tell the server every few seconds that we live. 410 means the session is over."""
        last_success = loop_time()
        while True:
            await asyncio.sleep(self.config.heartbeat_interval_s)
            if self._session_is_over:
                return
            try:
                await self._beat()
                last_success = loop_time()
            except TinkerError as exc:
                if isinstance(exc, APIStatusError) and exc.status_code == 410:
                    logger.warning("The server ended session %s.", self.session_id)
                    self._session_is_over = True
                    return
                self._warn_if_silent(last_success, exc)

    async def _beat(self) -> None:
        body = orjson.dumps({"session_id": self.session_id, "type": "session_heartbeat"})
        call = Call(
            method="POST",
            path="session_heartbeat",
            pool="session",
            body=body,
            timeout_s=10.0,
            max_retries=0,
        )
        await self.transport.call(call)
        events.emit("session.heartbeat", session_id=self.session_id)

    def end_if_gone(self, successor: Holder) -> APIFuture[bool]:
        """Its work goes on in `successor`: end the session here, unless the server still knows it.

        A session that still lives may have other clients, and is kept alive for them. One that is
        gone can serve nobody: its calls end, with an error that says where to go on. Gives whether
        it is gone.
        """

        async def look(waiting: Waiting) -> bool:
            if self._closed:  # by its owner, for whom nothing goes on
                return True
            try:
                await self._beat()
            except TinkerError as exc:
                logger.info("Session %s is left alone from now on: %s", self.session_id, exc)
                self._session_is_over = True
                self.successor = successor
                self._ended_by_close.update(self._calls)
                for task in self._calls | self._tasks:
                    task.cancel()
                return True
            return False

        return spawn(look)

    def _lost(self) -> RetryableException:
        return RetryableException(
            f"Session {self.session_id} was lost with its server, and its training goes on in "
            f"session {self.latest.session_id}. The ServiceClient has moved there: make this "
            "client again from it."
        )

    @property
    def latest(self) -> Holder:
        """This holder, or the one in which its work goes on by now."""
        holder = self
        while holder.successor is not None:
            holder = holder.successor
        return holder

    def _warn_if_silent(self, last_success: float, error: Exception) -> None:
        silent_s = loop_time() - last_success
        if silent_s > _HEARTBEAT_WARNING_S:
            logger.warning("No heartbeat reached the server for %.0f s: %s", silent_s, error)

    async def _refresh_dynamic(self) -> None:
        while True:
            await asyncio.sleep(max(self.dynamic.refresh_interval_sec, _MIN_REFRESH_S))
            with contextlib.suppress(TinkerError):
                await self._fetch_dynamic(with_retries=False)

    def cancel_sample(self, request_id: str) -> None:
        """Ask the server, in the background, to stop a sample nobody waits for any more."""
        if not self.dynamic.sample_cancel_enabled or self._closed:
            return
        if self._cancels is None:
            self._cancels = asyncio.Queue()
            self._background(self._drain_cancels(self._cancels))
        self._cancels.put_nowait(request_id)

    async def _drain_cancels(self, queue: asyncio.Queue[str]) -> None:
        while True:
            batch = [await queue.get()]
            while not queue.empty() and len(batch) < self.dynamic.sample_cancel_max_batch_size:
                batch.append(queue.get_nowait())
            results = await asyncio.gather(*map(self._cancel_one, batch), return_exceptions=True)
            for error in results:
                if isinstance(error, BaseException):
                    logger.info("Cancelling a sample failed: %s", error)

    async def _cancel_one(self, request_id: str) -> None:
        body = orjson.dumps({"request_id": request_id})
        await self.execute(
            Call(
                method="POST",
                path="cancel_future",
                pool="futures",
                body=body,
                timeout_s=30.0,
                max_retries=0,
            )
        )

    # -- ending

    def close_first(self, owned: Closable) -> None:
        """Await `owned.close()` when the holder closes, before its connections go."""
        self._closers.add(owned)

    async def close(self, status: str | None = None, detail: str | None = None) -> None:
        """Finish the session with a reason, stop all tasks, close the connections."""
        if self._closed:
            return
        was_ready, self._closed, self._ready = self._ready, True, False
        try:
            is_ours = self.session_id is not None and not self.is_shadow
            if was_ready and status is not None and is_ours and not self._session_is_over:
                await self._finish(status, detail)
            if self.reporter is not None:
                await self.reporter.drain()
        finally:
            for owned in tuple(self._closers):
                await owned.close()
            self._ended_by_close.update(self._calls)
            await cancel_all(self._calls | self._tasks)
            if self._connected:
                await self.transport.close()
            if self._local is not None:
                await self._local.leave()

    async def _finish(self, status: str, detail: str | None) -> None:
        # The null is sent: the server tells "no detail" from "not given".
        body = orjson.dumps({"reason": {"type": status}, "detail": detail})
        path = f"sessions/{self.session_id}/finish"
        call = Call(
            method="POST",
            path=path,
            body=body,
            timeout_s=_FINISH_TIMEOUT_S / 2,
            max_retries=None if self._local is None else 0,
        )
        try:
            async with asyncio.timeout(_FINISH_TIMEOUT_S):
                # Nobody starts a dead embedded server again for a goodbye.
                await self.execute(call, window=self._local is None)
        except (APIStatusError, APIConnectionError, TimeoutError) as exc:
            logger.info("The session could not be finished on the server: %s", exc)


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
    import hashlib

    key = (config.base_url, hashlib.sha256((config.api_key or "").encode()).hexdigest())
    holder = _shared.get(key)
    if holder is None or holder._closed:
        holder = _shared[key] = Holder(config, with_session=False)
    return holder
