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
from dataclasses import dataclass, replace

from tinkex import types
from tinkex.client.background_loop import background
from tinkex.client.futures import cancel_all
from tinkex.client.http.call import Call
from tinkex.client.http.options import Options
from tinkex.client.session.holder import Holder, parse
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
    """A request of a call. `encode` gets the sequence number and may run on another thread."""

    encode: Callable[[int], Call]
    size_bytes: int = 0
    """Counted against the server's submit budget; 0 for small requests."""

    def having(self, options: Options, part: int) -> CallPart:
        """The same request with the options of a caller, as that part of his call."""
        encode = self.encode
        return replace(self, encode=lambda seq_id: encode(seq_id).having(options, part))


class Submission:
    """A call in its place of the order: its requests, and what becomes of them."""

    def __init__(self, parts: Sequence[CallPart]) -> None:
        self.parts = parts
        self.accepted: asyncio.Future[list[Accepted]] = background().loop.create_future()
        # Nobody may be waiting (the call was cancelled); asyncio would complain about the error.
        self.accepted.add_done_callback(lambda done: done.cancelled() or done.exception())

    def end(self, results: Sequence[Accepted | Exception]) -> None:
        """Every request was sent; one that was refused is the end of the whole call."""
        accepted = [result for result in results if isinstance(result, Accepted)]
        refused = [result for result in results if isinstance(result, Exception)]
        if refused:
            self.accepted.set_exception(refused[0])
        else:
            self.accepted.set_result(accepted)


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
        self._queue.append(submission)
        background().submit(self._begin)

    async def close(self) -> None:
        """Give up what was not sent yet."""
        if self._draining is not None:
            await cancel_all([self._draining])
        while self._queue:
            self._queue.popleft().end([ClientClosedError(_CLOSED)])

    def _begin(self) -> None:
        if self._draining is None or self._draining.done():
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Send one call after the other.

        Every chunk is sent even when one is refused: a missing number would stall the model.
        """
        while self._queue:
            submission = self._queue.popleft()
            sent: list[Accepted | Exception] = []
            try:
                await self._holder.ready()
                numbered = list(enumerate(submission.parts, self._next_seq_id))
                is_parallel = self._holder.flags.parallel_fwdbwd_chunks
                late = numbered[1:] if is_parallel else []
                late_sent = await asyncio.gather(*(self._send(*one) for one in late))
                for number, part in numbered[: len(numbered) - len(late)]:
                    sent.append(await self._send(number, part))
                sent += late_sent
            except asyncio.CancelledError:
                submission.end([ClientClosedError(_CLOSED)])
                raise
            except Exception as exc:
                sent = [exc]
            submission.end(sent)

    async def _send(self, seq_id: int, part: CallPart) -> Accepted | Exception:
        try:
            # A large body is built on another thread, so that heartbeats and polls go on meanwhile.
            is_small = part.size_bytes <= _ENCODE_ON_LOOP_BYTES
            call = part.encode(seq_id) if is_small else await asyncio.to_thread(part.encode, seq_id)
            # Only now: a request that could not be encoded never existed, and takes no number.
            self._next_seq_id = max(self._next_seq_id, seq_id + 1)
            started = time.monotonic()
            room = self._holder.budgets.training.hold(part.size_bytes) if part.size_bytes else None
            async with room or nullcontext():
                reply = await self._holder.transport.call(call)
            promise = parse(reply, types.UntypedAPIFuture)
            return Accepted(promise.request_id, time.monotonic() - started)
        except Exception as exc:
            return exc
