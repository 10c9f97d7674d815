"""Collect many samples with one long poll (4.5), and submit many in one call.

`Collector` asks `/retrieve_futures` which results of one sampling session are ready, only while
someone waits or an acknowledgement is pending. Against our own server (flag `tinkex_sample_batch`)
it asks for the results themselves in the same answer, and `BatchSubmitter` joins the samples that
were made in the same moment into one `/asample_batch`:

    POST asample_batch     {"requests": [asample body, ...]}   of one sampling session
      -> {"promises": [{"request_id", "sample_sequence_ids"}
                       | {"status", "error", "category", "retry_after_ms"?}, ...]}   in order
    POST retrieve_futures  the usual body plus "inline_results": true
      -> the results, joined as `wire.frames` has it

The server takes as many as `SampleBatchRequest` declares; a client sends `MAX_REQUESTS` at most.
Neither class knows what a sample is made of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tinkex.client.futures import cancel_all
from tinkex.client.http.call import Call, status_error
from tinkex.client.http.http1 import Reply
from tinkex.client.http.retry import BillingPause
from tinkex.client.session.polling import POLL_TIMEOUT_S, PollRetry, failure
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    ClientClosedError,
    RequestFailedError,
    TinkerError,
)
from tinkex.types.service.futures import FuturesRetrieveRequest, SamplingSessionFuturesTarget
from tinkex.wire import Body, frames, requests

logger = logging.getLogger("tinkex.sampling")

_RETRY_S = 1.0
_FIRST_POLL_S = 0.25
"""A poll is held until something is ready, for half a minute at most. The first one for a sample
ends sooner where the server then says what it waits for, so that `status()` knows."""
OnWaiting = Callable[[str | None, str | None], None]
"""Hears the queue state and the reason of waiting."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A result that is ready: its payload, or the size it will have, or neither."""

    payload: bytes | None = None
    size_bytes: int | None = None


class Collector:
    """The one poller of a sampling session and clone. Lives on the background loop."""

    def __init__(
        self,
        exchange: Callable[[Call], Awaitable[Reply]],
        sampling_session_id: str,
        clone_id: int,
        *,
        billing: BillingPause,
        inline: bool = False,
    ) -> None:
        self._exchange = exchange
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._inline = inline
        self._cursor = 0
        self._waiters: dict[str, asyncio.Future[FinishedSample]] = {}
        self._listeners: dict[str, OnWaiting] = {}
        self._untold: set[str] = set()
        """Waiting, and nobody has said for what yet."""
        # Ready before its waiter registered: the poll may overtake the submit's answer.
        self._early: dict[str, FinishedSample | RequestFailedError] = {}
        self._retrieved: set[str] = set()
        self._retry = PollRetry(billing)
        self._dead: TinkerError | None = None
        self._task: asyncio.Task[None] | None = None

    async def wait(self, request_id: str, on_waiting: OnWaiting | None = None) -> FinishedSample:
        """Wait until the result is ready. `on_waiting` hears why it is not, where the server says.

        Raises:
            RequestFailedError: The server said why it failed.
            TinkerError: The poller itself had to give up.
        """
        if self._dead is not None:
            raise self._dead
        early = self._early.pop(request_id, None)
        if isinstance(early, Exception):
            raise early
        if early is not None:
            return early
        waiter: asyncio.Future[FinishedSample] = asyncio.get_running_loop().create_future()
        self._waiters[request_id] = waiter
        if on_waiting is not None:
            self._listeners[request_id] = on_waiting
            self._untold.add(request_id)
        self._wake()
        try:
            return await waiter
        finally:
            self._waiters.pop(request_id, None)
            self._listeners.pop(request_id, None)
            self._untold.discard(request_id)

    def acknowledge(self, request_id: str) -> None:
        """The result was read, or nobody wants it: the server may forget it."""
        self._retrieved.add(request_id)
        self._wake()

    def _wake(self) -> None:
        if self._dead is None and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])

    async def _run(self) -> None:
        try:
            while self._waiters or self._retrieved:
                await self._poll()
        except asyncio.CancelledError:
            self._fail_all(ClientClosedError("The client was closed while samples waited."))
            raise
        except TinkerError as exc:
            self._dead = exc
            self._fail_all(exc)
        except Exception as exc:
            logger.exception("The sample poller crashed.")
            self._dead = TinkerError(f"The sample poller crashed: {exc!r}. Make a new client.")
            self._fail_all(self._dead)

    def _fail_all(self, error: TinkerError) -> None:
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(error)

    async def _poll(self) -> None:
        told = sorted(self._retrieved)
        try:
            reply = await self._exchange(self._call(told))
        except APIConnectionError:
            await asyncio.sleep(self._retry.delay_s(None) or 0.0)
            return
        if not reply.ok:
            await self._refused(reply)
            return
        self._retry.answered()
        # Only those that this poll named: others were acknowledged while it was held.
        self._retrieved.difference_update(told)
        self._take(reply)
        # Let the samples that were waiting read and acknowledge, before the next poll is held.
        await asyncio.sleep(0)

    def _call(self, told: list[str]) -> Call:
        timeout_s = None
        if not self._waiters:
            timeout_s = 0.0  # only an acknowledgement: nothing to wait for
        elif self._inline and self._untold:
            timeout_s = _FIRST_POLL_S
        request = FuturesRetrieveRequest.unchecked(
            target=self._target,
            prev_cursor=self._cursor,
            timeout=timeout_s,
            retrieved_request_ids=told,
            inline_results=self._inline or None,
        )
        return Call.to(
            "retrieve_futures", request, pool="poller", timeout_s=POLL_TIMEOUT_S, quick_retries=0
        )

    async def _refused(self, reply: Reply) -> None:
        pause_s, error = self._retry.delay_s(reply), status_error(self._call([]), reply)
        if pause_s is None and not error.retryable:
            raise error
        # `PollRetry` has no pause for a 5xx, and nothing here slows quick answers down.
        await asyncio.sleep(max(pause_s or 0.0, _RETRY_S))

    def _take(self, reply: Reply) -> None:
        payloads: list[bytes | None] = []
        if frames.FRAMES in reply.content_type:
            header, payloads = frames.read(reply.content)
        else:
            header = reply.json()
        if not isinstance(header, dict) or not isinstance(header.get("completions"), list):
            raise APIResponseValidationError("retrieve_futures answered without 'completions'.")
        for entry, payload in zip_longest(header["completions"], payloads):
            self._settle(entry, payload)
        if "waiting" in header:
            self._untold.clear()
        for entry in header.get("waiting") or ():
            if (listener := self._listeners.get(entry.get("request_id"))) is not None:
                listener(entry.get("queue_state"), entry.get("queue_state_reason"))
        cursor = header.get("cursor")
        self._cursor = cursor if isinstance(cursor, int) else self._cursor

    def _settle(self, entry: dict[str, Any], payload: bytes | None) -> None:
        request_id = entry["request_id"]
        outcome: FinishedSample | RequestFailedError
        if entry.get("state") == "failed" and "error" in entry:
            outcome = failure(entry, request_id)
        else:
            outcome = FinishedSample(payload, entry.get("response_payload_uncompressed_size"))
        waiter = self._waiters.pop(request_id, None)
        if waiter is None:
            # An acknowledged one was read or cancelled: nobody will come for it.
            if request_id not in self._retrieved:
                self._early[request_id] = outcome
        elif not waiter.done():
            if isinstance(outcome, Exception):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)


_Sample = tuple[Body, asyncio.Future[dict[str, Any]]]
"""A sample's body, and the future of its entry of the answer."""


class BatchSubmitter:
    """Join samples made in the same moment into one call. Lives on the background loop."""

    MAX_REQUESTS = 256
    MAX_BYTES = 4_000_000

    def __init__(
        self,
        post: Callable[[Call], Awaitable[Reply]],
        begin: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._post = post
        self._begin = begin
        self._pending: list[_Sample] = []

    async def submit(self, body: Body) -> dict[str, Any]:
        """Submit a sample with others; gives its promise, or a refusal with its `status`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append((body, answer))
        return await answer

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        batch: list[_Sample] = []
        size = 0
        for body, answer in pending:
            num_bytes = len(body.content)
            if batch and (len(batch) >= self.MAX_REQUESTS or size + num_bytes > self.MAX_BYTES):
                self._begin(self._deliver(batch))
                batch, size = [], 0
            batch.append((body, answer))
            size += num_bytes
        if batch:
            self._begin(self._deliver(batch))

    async def _deliver(self, batch: list[_Sample]) -> None:
        try:
            promises = await self._ask([body for body, _ in batch])
        except BaseException as exc:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(exc)
            if not isinstance(exc, Exception):
                raise
            return
        for (_, answer), promise in zip(batch, promises, strict=True):
            if not answer.done():
                answer.set_result(promise)

    async def _ask(self, bodies: list[Body]) -> list[dict[str, Any]]:
        call = Call.to(
            "asample_batch",
            requests.join_samples(bodies),
            pool="sample",
            headers={"X-Tinker-Sampling-Backpressure": "1"},
            quick_retries=0,
            waits_itself=True,
        )
        reply = await self._post(call)
        promises = (reply.json() or {}).get("promises")
        if not isinstance(promises, list) or len(promises) != len(bodies):
            raise APIResponseValidationError(
                f"asample_batch took {len(bodies)} requests and gave not as many promises."
            )
        return promises
