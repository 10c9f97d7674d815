"""The order of one training client's requests, fixed when the call is made.

`SubmitQueue` sends requests one after the other: a request leaves when its predecessor's submit
returned, whatever became of it (5.1). The server orders by number, so it would also take them out
of order; but a refused request must be known before its successors build on it, and a server that
is away is asked by one request and not by all that wait. Chunks of one call leave together, the
first one last (5.3): it is the one that makes the server begin, and by then the others are there.
A call that nobody waits for any more is still sent, because the calls behind it count on its
number. The queue knows bodies and promises; polling for results happens elsewhere, in parallel.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from tinkex import types
from tinkex.client.futures import cancel_all
from tinkex.client.http.transport import Call
from tinkex.client.session.background_loop import background
from tinkex.client.session.holder import Holder
from tinkex.errors import ClientClosedError

_ENCODE_ON_LOOP_BYTES = 65_536
_CLOSED = "The client was closed before this call was sent. Make a new ServiceClient."


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server has taken a request and promised its result under this id."""

    request_id: str
    roundtrip_s: float


@dataclass(frozen=True, slots=True)
class CallPart:
    """One request of a call. `encode` gets the sequence number and may run on another thread."""

    encode: Callable[[int], Call]
    size_bytes: int = 0
    """Counted against the server's submit budget; 0 for small requests."""


@dataclass(slots=True)
class Submission:
    """One call in its place: its requests, and what becomes of them."""

    parts: Sequence[CallPart]
    accepted: asyncio.Future[list[Accepted]] | None = None


class SubmitQueue:
    """`put` may be called from any thread; the rest runs on the background loop."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._next_seq_id = 1
        self._queue: deque[Submission] = deque()
        self._draining: asyncio.Task[None] | None = None
        holder.calls.close_first(self)

    def put(self, submission: Submission) -> None:
        """Take the next place in the order, now."""
        background().submit(self._accept, submission)

    async def close(self) -> None:
        """Give up what was not sent yet."""
        if self._draining is not None:
            await cancel_all([self._draining])
        while self._queue:
            accepted = self._queue.popleft().accepted
            if accepted is not None:
                accepted.set_exception(ClientClosedError(_CLOSED))

    def _accept(self, submission: Submission) -> None:
        loop = asyncio.get_running_loop()
        submission.accepted = loop.create_future()
        # Nobody may be waiting (the call was cancelled); asyncio would complain about the error.
        submission.accepted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._queue.append(submission)
        if self._draining is None or self._draining.done():
            self._draining = loop.create_task(self._drain())

    async def _drain(self) -> None:
        while self._queue:
            submission = self._queue.popleft()
            assert submission.accepted is not None
            try:
                await self._holder.ready()
                results = await self._send_all(submission.parts)
            except asyncio.CancelledError:
                submission.accepted.set_exception(ClientClosedError(_CLOSED))
                raise
            except Exception as exc:
                results = [exc]
            errors = [result for result in results if isinstance(result, BaseException)]
            if errors:
                submission.accepted.set_exception(errors[0])
            else:
                accepted = [result for result in results if isinstance(result, Accepted)]
                submission.accepted.set_result(accepted)

    async def _send_all(self, parts: Sequence[CallPart]) -> list[Accepted | BaseException]:
        """Every chunk is sent even when one is refused: a missing number would stall the model."""
        numbered = list(enumerate(parts, self._next_seq_id))
        rest: list[Accepted | BaseException] = []
        if len(parts) > 1 and self._holder.flags.parallel_fwdbwd_chunks:
            late = (self._send(part, number) for number, part in numbered[1:])
            rest = await asyncio.gather(*late, return_exceptions=True)
        one_by_one: list[Accepted | BaseException] = []
        for number, part in numbered[: len(parts) - len(rest)]:
            try:
                one_by_one.append(await self._send(part, number))
            except Exception as exc:
                one_by_one.append(exc)
        return [*one_by_one, *rest]

    async def _send(self, part: CallPart, seq_id: int) -> Accepted:
        # A large body is built on another thread, so that heartbeats and polls go on meanwhile.
        is_small = part.size_bytes <= _ENCODE_ON_LOOP_BYTES
        call = part.encode(seq_id) if is_small else await asyncio.to_thread(part.encode, seq_id)
        # Only now: a request that could not be encoded never existed, and takes no number.
        self._next_seq_id = max(self._next_seq_id, seq_id + 1)
        started = time.monotonic()
        budget = self._holder.budgets.training.hold(part.size_bytes) if part.size_bytes else None
        async with budget or nullcontext():
            promise = await self._holder.ask(call, types.UntypedAPIFuture)
        return Accepted(promise.request_id, time.monotonic() - started)
