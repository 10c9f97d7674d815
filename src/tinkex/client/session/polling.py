"""Turn a promise into its result: the contract's table 4.2, row by row.

`Poller.wait` asks `/retrieve_future` until the answer is final. A server that long-polls is asked
again at once; one that answers "not yet" immediately is asked with growing pauses (R17). Queue
states go to observers, one call per change, and to the log at most once a minute (R18). What the
result is made of is the `Expect`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tinkex import events
from tinkex.client.background_loop import loop_time
from tinkex.client.futures import Waiting
from tinkex.client.http.call import Call, status_error
from tinkex.client.http.http1 import Reply
from tinkex.client.http.limits import ByteSemaphore
from tinkex.client.http.retry import (
    BillingPause,
    obeyed_s,
    parse_retry_after_s,
    says_no_retry,
)
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    InvalidInputError,
    PromiseLostError,
    RequestFailedError,
    RetrieveError,
    WireError,
)
from tinkex.types.service.futures import (
    FutureRetrieveRequest,
    QueueState,
    RequestFailedResponse,
)
from tinkex.wire import json_codec, results
from tinkex.wire.generation import JSON, PROTOBUF, Generation

logger = logging.getLogger("tinkex.futures")
T = TypeVar("T")

# A server holds a poll for half a minute at most; a poll that takes longer than this is lost.
POLL_TIMEOUT_S = 45.0
# Answers this quick were not held. A few in a row are chance (the result came just then); after
# them the server is taken for one that does not long-poll, and is asked with growing pauses.
_QUICK_S = 0.25
_FREE_QUICK_POLLS = 3
_MAX_PAUSE_S = 30.0
# Decoding more than this on the loop would delay heartbeats and all other polls.
_DECODE_ON_LOOP_BYTES = 262_144

_DEFAULT_REASONS = {
    "paused_capacity": "the server is short on capacity",
    "paused_rate_limit": "the account's rate limit is reached",
}


@dataclass(frozen=True, slots=True)
class Expect(Generic[T]):
    """The result that a promise will become, and how to read it."""

    request_type: str
    """The `X-Tinker-Request-Type` header: `ForwardBackward`, `Sample` ..."""
    kind: type[T]
    in_protobuf: bool = False
    """The result travels as protobuf where the server can."""

    @classmethod
    def of(cls, endpoint: str, kind: type[T]) -> Expect[T]:
        """The promise of a call to `create_model` and its like: a `CreateModel`, in JSON."""
        return cls(endpoint.title().replace("_", ""), kind)

    @property
    def has_status(self) -> bool:
        """Whether `status` is a field of the result itself."""
        return "status" in getattr(self.kind, "model_fields", ())

    def decode(self, reply: Reply) -> T:
        content_type = PROTOBUF if PROTOBUF in reply.content_type else JSON
        try:
            return results.decode(self.kind, reply.content, content_type)
        except (InvalidInputError, ValueError, KeyError, TypeError) as exc:
            raise APIResponseValidationError(
                f"The server's {self.request_type} result cannot be read: {exc}",
                body=reply.content[:2000],
            ) from exc


class QueueStateObserver(Protocol):
    """Told when the reason of waiting changes, on the SDK's own thread."""

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None: ...


class QueueWatch:
    """The queue states of one client: changes go out once, the log hears at most once a minute."""

    def __init__(
        self,
        name: str,
        observer: QueueStateObserver | None = None,
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
            try:
                if self._observer is not None:
                    self._observer.on_queue_state_change(QueueState(seen[0]), reason)
            except Exception:  # the user's own code
                logger.exception("A queue observer failed; going on without it.")
        if seen[0] != "active" and self._clock() - self._logged >= 60:
            self._logged = self._clock()
            why = reason or _DEFAULT_REASONS.get(seen[0], f"queue state {seen[0]}")
            logger.warning("%s waits: %s", self._name, why)


class PollRetry:
    """The pauses between polls for one promise, or for all of a sampler (4.2).

    A poll asks for nothing new, so it is repeated without end; only a server that refuses it as
    wrong, again and again, ends it.
    """

    _MAX_BAD_REQUESTS = 3
    _MAX_PAUSE_S = 30.0

    def __init__(self, billing: BillingPause) -> None:
        self._billing = billing
        self._in_a_row = 0
        self._bad_requests = 0

    def answered(self) -> None:
        """The server said something that is not a refusal."""
        self._in_a_row = self._bad_requests = 0

    def delay_s(self, reply: Reply | None) -> float | None:
        """After a poll that was refused, or had no answer (None). None: give up."""
        if reply is not None and says_no_retry(reply.headers):
            return None
        asked_s = obeyed_s(parse_retry_after_s(reply.headers)) if reply else None
        if reply is None or reply.status == 429:
            self._in_a_row += 1
            return asked_s or min(2.0 ** min(self._in_a_row - 1, 10), self._MAX_PAUSE_S)
        self._in_a_row = 0
        if reply.status == 402:
            return self._billing.delay_s()
        if reply.status == 400 and self._bad_requests < self._MAX_BAD_REQUESTS:
            self._bad_requests += 1
            return 0.0
        # No pause unless the server asks for one: one that fails at once is slowed down like one
        # that answers at once.
        return asked_s or 0.0 if reply.status >= 500 else None


@dataclass(frozen=True, slots=True)
class Poller:
    """Polls promises of one holder. `exchange` makes one HTTP try and returns any answer."""

    exchange: Callable[[Call], Awaitable[Reply]]
    inflight: ByteSemaphore
    billing: BillingPause
    generation: Generation = Generation.V0_36

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
            # Also after an error or a cancel: room that stayed taken would stop all later results.
            self.inflight.release(poll.reserved or 0)


@dataclass(slots=True)
class _Poll(Generic[T]):
    """The state of one promise being polled."""

    owner: Poller
    request_id: str
    expect: Expect[T]
    waiting: Waiting
    watch: QueueWatch | None
    roundtrip_s: float | None
    retry: PollRetry = field(init=False)
    iteration: int = 0
    num_quick: int = 0
    """Answers in a row that the server did not hold."""
    reserved: int | None = None
    """Bytes of room taken for the payload, which from then on is sent with the answer."""

    def __post_init__(self) -> None:
        self.retry = PollRetry(self.owner.billing)

    async def run(self) -> T:
        while True:
            started = loop_time()
            try:
                reply = await self.owner.exchange(self._call())
            except APIConnectionError as exc:
                # The promise outlives the connection, and maybe the server's process: ask on.
                self.waiting.reason = f"connection trouble: {exc}"
                await asyncio.sleep(self.retry.delay_s(None) or 0.0)
                continue
            finally:
                self.iteration += 1
                self.waiting.num_polls = self.iteration  # chunks of one call share a `waiting`
            if not reply.ok:
                await self._failure(reply)
            else:
                self.retry.answered()
                if (result := await self._result(reply)) is not None:
                    return await self._decode(result)
            if reply.status not in (402, 429):  # these have paused already
                await self._pause_if_quick(started)

    def _call(self) -> Call:
        generation = self.owner.generation
        in_protobuf = self.expect.in_protobuf and generation is not Generation.V0_4
        headers = {
            "X-Tinker-Request-Iteration": str(self.iteration),
            "X-Tinker-Request-Type": self.expect.request_type,
            "Accept": PROTOBUF if in_protobuf else JSON,
        }
        if self.iteration == 0 and self.roundtrip_s is not None:
            headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{self.roundtrip_s:.6f}"
        # Room is taken for a large payload before it travels: the size comes first, alone.
        request = FutureRetrieveRequest.unchecked(
            request_id=self.request_id, allow_metadata_only=self.reserved is None
        )
        return Call.to(
            "retrieve_future",
            request,
            generation,
            pool="futures",
            headers=headers,
            timeout_s=POLL_TIMEOUT_S,
            quick_retries=0,
        )

    # -- 2xx

    async def _result(self, reply: Reply) -> Reply | None:
        """The answer with the result; None: not yet. Raises what the server says of a failure."""
        if PROTOBUF in reply.content_type:
            return reply
        body = _parsed(reply)
        if not isinstance(body, dict):
            return reply
        if body.get("type") == "try_again":
            self._still_waiting(body)
            return None
        status = body.get("status")
        if status is not None and not self.expect.has_status:
            return await self._by_status(str(status).lower(), body, reply)
        if "error" in body:
            raise failure(body, self.request_id)
        return reply

    async def _by_status(self, status: str, body: dict[str, Any], reply: Reply) -> Reply | None:
        """Like `_result`, of an answer that says how it stands as a `status`."""
        if status == "pending":
            self._still_waiting(body)
            return None
        if status == "complete_metadata":
            await self._payload_is_ready(body)
            return None
        if status == "failed":
            raise failure(body, self.request_id)
        if status == "completed":
            inside = body.get("result")
            if inside is None:  # the fields of the result stand beside the status, or it has none
                inside = {name: value for name, value in body.items() if name != "status"}
            return Reply(reply.status, reply.headers, json.dumps(inside).encode())  # NaN stays
        raise APIResponseValidationError(
            f"The server says of request {self.request_id} that it is {status[:100]!r}, which this "
            "SDK does not know, so it is not taken for a result.",
            body=body,
        )

    async def _decode(self, reply: Reply) -> T:
        self.waiting.state = "fetching"
        if len(reply.content) <= _DECODE_ON_LOOP_BYTES:
            return self.expect.decode(reply)
        return await asyncio.to_thread(self.expect.decode, reply)

    def _still_waiting(self, body: dict[str, Any]) -> None:
        state, reason = body.get("queue_state"), body.get("queue_state_reason")
        self.waiting.hear(state, reason)
        if self.watch is not None:
            self.watch.saw(self.request_id, state, reason)

    async def _payload_is_ready(self, body: dict[str, Any]) -> None:
        if self.reserved is not None:
            # Asking a third time would be a loop without a pause and without an end.
            raise APIResponseValidationError(
                f"The server announced the payload of {self.request_id} twice and never sent it.",
                body=body,
            )
        size = body.get("response_payload_size")
        await self.reserve(size if isinstance(size, int) and size > 0 else 0)

    async def reserve(self, size_bytes: int) -> None:
        """Wait until there is room for the payload; it is freed when the result is decoded."""
        self.waiting.state = "fetching"
        await self.owner.inflight.acquire(size_bytes)
        self.reserved = size_bytes

    # -- the rest

    async def _failure(self, reply: Reply) -> None:
        if reply.status == 408:
            # The held poll ran out. With a body it is the server's word; without, a proxy's.
            body = reply.json()
            if isinstance(body, dict):
                self.retry.answered()
                self._still_waiting(body)
            return
        if reply.status == 410:
            raise PromiseLostError(
                f"The server no longer knows request {self.request_id}; its result is lost. "
                "Training: go on from the last checkpoint.",
                request_id=self.request_id,
            )
        pause_s = self.retry.delay_s(reply)
        if pause_s is None:
            cause = status_error(self._call(), reply)
            raise RetrieveError(
                f"The server refuses to answer for request {self.request_id}: {cause}",
                status_code=reply.status,
                request=cause.request,
                body=cause.body,
                headers=cause.headers,
                request_id=self.request_id,
            ) from cause
        if reply.status == 402:
            self.waiting.reason = "paused: billing"
        if pause_s:
            await asyncio.sleep(pause_s)

    async def _pause_if_quick(self, started: float) -> None:
        """A server that does not hold the poll would be hammered; slow down for it alone."""
        if loop_time() - started > _QUICK_S:
            self.num_quick = 0
            return
        self.num_quick += 1
        over = self.num_quick - _FREE_QUICK_POLLS
        if over > 0:
            await asyncio.sleep(min(0.05 * 2.0 ** min(over, 12), _MAX_PAUSE_S))


def failure(body: dict[str, Any], request_id: str | None = None) -> RequestFailedError:
    """The error that a server tells of a request, in either of its forms."""
    said = RequestFailedResponse.model_validate(body)
    return RequestFailedError(said.error, request_id=request_id, category=said.category)


def _parsed(reply: Reply) -> Any:
    """A JSON answer. NaN is read only where a `status` may stand beside it: it takes its time."""
    body = reply.json()
    if body is None and b'"status"' in reply.content:
        with contextlib.suppress(WireError):
            return json_codec.loads(reply.content)
    return body
