"""Turn a promise into its result: the contract's table 4.2, row by row.

`Poller.wait` asks `/retrieve_future` until the answer is final. A server that long-polls is asked
again at once; one that answers "not yet" immediately is asked with growing pauses (R17). Queue
states go to observers, one call per change, and to the log at most once a minute (R18). What the
result is made of is the `Expect`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import orjson

from tinkex import events
from tinkex.client.futures import Waiting
from tinkex.client.http.backends import Reply
from tinkex.client.http.headers import JSON, PROTOBUF
from tinkex.client.http.limits import ByteSemaphore
from tinkex.client.http.retry import BillingPause, PollRetry
from tinkex.client.http.transport import Call, status_error
from tinkex.client.session.background_loop import loop_time
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    InvalidInputError,
    PromiseLostError,
    RequestFailedError,
    RetrieveError,
    TinkerError,
)
from tinkex.wire import results

__all__ = ["Expect", "Poller", "QueueObserver", "QueueWatch"]

logger = logging.getLogger("tinkex.futures")
T = TypeVar("T")

POLL_TIMEOUT_S = 45.0
_QUICK_S = 0.25
_FREE_QUICK_POLLS = 3
_MAX_PAUSE_S = 30.0
_DECODE_ON_LOOP_BYTES = 262_144
_CATEGORIES = frozenset({"unknown", "server", "user"})

_DEFAULT_REASONS = {
    "paused_capacity": "the server is short on capacity",
    "paused_rate_limit": "the account's rate limit is reached",
}


@dataclass(frozen=True, slots=True)
class Expect(Generic[T]):
    """What a promise will become, and how to read it."""

    request_type: str
    """The `X-Tinker-Request-Type` header: `ForwardBackward`, `Sample` ..."""
    kind: type[T]
    in_protobuf: bool = False
    """The result travels as protobuf where the server can."""

    @classmethod
    def of(cls, endpoint: str, kind: type[T]) -> Expect[T]:
        """What a call to `create_model` and its like promises: a `CreateModel`, in JSON."""
        return cls(endpoint.title().replace("_", ""), kind)

    def decode(self, reply: Reply) -> T:
        content_type = PROTOBUF if PROTOBUF in reply.content_type else JSON
        try:
            return results.decode(self.kind, reply.content, content_type)
        except (InvalidInputError, ValueError, KeyError, TypeError) as exc:
            raise APIResponseValidationError(
                f"The server's {self.request_type} result cannot be read: {exc}",
                body=reply.content[:2000],
            ) from exc


class QueueObserver(Protocol):
    """Told when the reason of waiting changes."""

    def on_queue_state_change(self, queue_state: Any, queue_state_reason: str | None) -> None: ...


class QueueWatch:
    """The queue states of one client: changes go out once, the log hears at most once a minute."""

    def __init__(
        self,
        name: str,
        observer: QueueObserver | None = None,
        *,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self._name = name
        self._observer = observer
        self._clock = clock
        self._last: tuple[str, str | None] | None = None
        self._logged = float("-inf")

    def saw(self, request_id: str, state: str | None, reason: str | None) -> None:
        if state is None and reason is None:
            return
        seen = (state or "unknown", reason)
        if seen != self._last:
            self._last = seen
            events.emit("queue.change", request_id=request_id, state=seen[0], reason=reason)
            self._tell(seen)
        if seen[0] != "active" and self._clock() - self._logged >= 60:
            self._logged = self._clock()
            why = reason or _DEFAULT_REASONS.get(seen[0], f"queue state {seen[0]}")
            logger.warning("%s waits: %s", self._name, why)

    def _tell(self, seen: tuple[str, str | None]) -> None:
        if self._observer is None:
            return
        from tinkex.types import QueueState

        known = {member.value: member for member in QueueState}
        state = known.get(seen[0], known.get("unknown"))
        try:
            self._observer.on_queue_state_change(state, seen[1])
        except Exception:
            logger.exception("A queue observer failed; going on without it.")


class Poller:
    """Polls promises of one holder. `exchange` makes one HTTP try and returns any answer."""

    def __init__(
        self,
        exchange: Callable[[Call], Awaitable[Reply]],
        *,
        inflight: ByteSemaphore,
        billing: BillingPause,
        old_generation: bool = False,
    ) -> None:
        self._exchange = exchange
        self._inflight = inflight
        self._billing = billing
        self._old = old_generation

    async def wait(
        self,
        request_id: str,
        expect: Expect[T],
        *,
        waiting: Waiting | None = None,
        watch: QueueWatch | None = None,
        roundtrip_s: float | None = None,
        known_size: int | None = None,
    ) -> T:
        """Poll until the result is there.

        `known_size`: another poller already said that the payload is ready and how large it is.

        Raises:
            RequestFailedError: The server could not fulfil the request.
            PromiseLostError: The server no longer knows the promise.
            RetrieveError: The server refuses to answer for good.
        """
        poll = _Poll(self, request_id, expect, waiting or Waiting(), watch, roundtrip_s)
        poll.waiting.request_id = request_id
        poll.waiting.state = "submitted"
        try:
            if known_size:
                await poll.reserve(known_size)
            with events.span("future", request_id=request_id, request_type=expect.request_type):
                return await poll.run()
        finally:
            poll.release()


class _Poll(Generic[T]):
    """The state of one promise being polled."""

    def __init__(
        self,
        owner: Poller,
        request_id: str,
        expect: Expect[T],
        waiting: Waiting,
        watch: QueueWatch | None,
        roundtrip_s: float | None,
    ) -> None:
        self._owner = owner
        self._request_id = request_id
        self._expect = expect
        self.waiting = waiting
        self._watch = watch
        self._roundtrip_s = roundtrip_s
        self._iteration = 0
        self._retry = PollRetry(owner._billing)
        self._quick = 0
        self._metadata_ok = True
        self._reserved = 0

    async def run(self) -> T:
        while True:
            started = loop_time()
            try:
                reply = await self._owner._exchange(self._call())
            except APIConnectionError as exc:
                self.waiting.reason = f"connection trouble: {exc}"
                await asyncio.sleep(self._retry.delay_s(None) or 0.0)
                continue
            finally:
                self._iteration += 1
                self.waiting.num_polls = self._iteration
            if reply.ok:
                self._retry.answered()
                done, value = await self._success(reply)
                if done:
                    return value  # type: ignore[return-value]
            else:
                await self._failure(reply)
            if reply.status not in (402, 429):
                await self._pause_if_quick(started)

    def _call(self) -> Call:
        headers = {
            "X-Tinker-Request-Iteration": str(self._iteration),
            "X-Tinker-Request-Type": self._expect.request_type,
        }
        headers["Accept"] = PROTOBUF if self._expect.in_protobuf else JSON
        if self._owner._old:
            headers["Accept"] = JSON
        if self._iteration == 0 and self._roundtrip_s is not None:
            headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{self._roundtrip_s:.6f}"
        body: dict[str, Any] = {"request_id": self._request_id}
        if not self._owner._old:
            body["allow_metadata_only"] = self._metadata_ok
        return Call(
            method="POST",
            path="retrieve_future",
            pool="futures",
            body=orjson.dumps(body),
            headers=headers,
            timeout_s=POLL_TIMEOUT_S,
            max_retries=0,
        )

    # -- 2xx

    async def _success(self, reply: Reply) -> tuple[bool, T | None]:
        if PROTOBUF in reply.content_type:
            return True, await self._decode(reply)
        body = reply.json()
        if isinstance(body, dict):
            if body.get("type") == "try_again":
                self._still_waiting(body)
                return False, None
            if body.get("status") == "complete_metadata":
                await self._payload_is_ready(body)
                return False, None
            if "error" in body:
                raise self._failed(body)
        return True, await self._decode(reply)

    async def _decode(self, reply: Reply) -> T:
        self.waiting.state = "fetching"
        if len(reply.content) <= _DECODE_ON_LOOP_BYTES:
            return self._expect.decode(reply)
        return await asyncio.to_thread(self._expect.decode, reply)

    def _still_waiting(self, body: dict[str, Any]) -> None:
        state, reason = body.get("queue_state"), body.get("queue_state_reason")
        self.waiting.hear(state, reason)
        if self._watch is not None:
            self._watch.saw(self._request_id, state, reason)

    async def _payload_is_ready(self, body: dict[str, Any]) -> None:
        if not self._metadata_ok:
            raise APIResponseValidationError(
                f"The server announced the payload of {self._request_id} twice and never sent it.",
                body=body,
            )
        size = body.get("response_payload_size")
        await self.reserve(size if isinstance(size, int) and size > 0 else 0)

    async def reserve(self, size_bytes: int) -> None:
        """Wait until there is room for the payload; it is freed when the result is decoded."""
        self.waiting.state = "fetching"
        await self._owner._inflight.acquire(size_bytes)
        self._reserved += size_bytes
        self._metadata_ok = False

    def release(self) -> None:
        if self._reserved:
            self._owner._inflight.release(self._reserved)
            self._reserved = 0

    def _failed(self, body: dict[str, Any]) -> RequestFailedError:
        category = str(body.get("category", "unknown")).lower()
        return RequestFailedError(
            str(body["error"]),
            request_id=self._request_id,
            category=category if category in _CATEGORIES else "unknown",
        )

    # -- the rest

    async def _failure(self, reply: Reply) -> None:
        if reply.status == 408:
            body = reply.json()
            if isinstance(body, dict):
                self._retry.answered()
                self._still_waiting(body)
            return
        if reply.status == 410:
            raise PromiseLostError(
                f"The server no longer knows request {self._request_id}; its result is lost. "
                "Training: go on from the last checkpoint.",
                request_id=self._request_id,
            )
        pause_s = self._retry.delay_s(reply.status)
        if pause_s is None:
            raise self._refused(reply)
        if reply.status == 402:
            self.waiting.reason = "paused: billing"
        if pause_s:
            await asyncio.sleep(pause_s)

    def _refused(self, reply: Reply) -> TinkerError:
        cause = status_error(self._call(), reply)
        error = RetrieveError(
            f"The server refuses to answer for request {self._request_id}: {cause}",
            status_code=reply.status,
            request=cause.request,
            body=cause.body,
            headers=cause.headers,
            request_id=self._request_id,
        )
        error.__cause__ = cause
        return error

    async def _pause_if_quick(self, started: float) -> None:
        """A server that does not hold the poll would be hammered; slow down for it alone."""
        if loop_time() - started > _QUICK_S:
            self._quick = 0
            return
        self._quick += 1
        over = self._quick - _FREE_QUICK_POLLS
        if over > 0:
            await asyncio.sleep(min(0.05 * 2.0 ** min(over, 12), _MAX_PAUSE_S))
