"""The order of one training client's requests, fixed when the call is made.

`Lane` posts requests one after the other: a request leaves when its predecessor's submit returned,
whatever became of it (5.1). Chunks of one call leave together, the first one last (5.3). A call
that nobody waits for any more is still sent, because the calls behind it build on its number. The
lane knows bodies and promises; polling for results happens elsewhere, in parallel.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tinkex import types
from tinkex.client.futures import cancel_all
from tinkex.client.http.transport import Call
from tinkex.client.session.holder import Holder, parse
from tinkex.client.session.loop import background
from tinkex.errors import ClientClosedError

__all__ = ["Lane", "Part", "Promise", "Submission"]

logger = logging.getLogger("tinkex.training")

_ENCODE_ON_LOOP_BYTES = 65_536
_CLOSED = "The client was closed before this call was sent. Make a new ServiceClient."


@dataclass(frozen=True, slots=True)
class Promise:
    request_id: str
    roundtrip_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """One request of a call. `encode` gets the sequence number and may run on another thread."""

    encode: Callable[[int], Call]
    size_bytes: int = 0
    """Counted against the server's submit budget; 0 for small requests."""


@dataclass(slots=True)
class Submission:
    parts: Sequence[Part]
    promises: asyncio.Future[list[Promise]] | None = None
    made: float = field(default_factory=time.monotonic)


class Lane:
    """The submit queue of one training client. `put` may be called from any thread."""

    def __init__(self, holder: Holder, first_seq_id: int = 1) -> None:
        self._holder = holder
        self._next_seq_id = first_seq_id
        self._queue: deque[Submission] = deque()
        self._draining: asyncio.Task[None] | None = None
        holder.calls.close_first(self)

    async def close(self) -> None:
        """Give up what was not sent yet."""
        if self._draining is not None:
            await cancel_all([self._draining])
        while self._queue:
            promises = self._queue.popleft().promises
            if promises is not None:
                promises.set_exception(ClientClosedError(_CLOSED))

    def put(self, submission: Submission) -> None:
        """Take the next place in the order, now."""
        background().submit(self._accept, submission)

    def _accept(self, submission: Submission) -> None:
        loop = asyncio.get_running_loop()
        submission.promises = loop.create_future()
        # Nobody may be waiting (the call was cancelled); asyncio would complain about the error.
        submission.promises.add_done_callback(_retrieved)
        self._queue.append(submission)
        if self._draining is None or self._draining.done():
            self._draining = loop.create_task(self._drain())

    async def _drain(self) -> None:
        while self._queue:
            submission = self._queue.popleft()
            assert submission.promises is not None
            try:
                promises = await self._post_all(submission.parts)
            except asyncio.CancelledError:
                submission.promises.set_exception(ClientClosedError(_CLOSED))
                raise
            except Exception as exc:
                submission.promises.set_exception(exc)
            else:
                submission.promises.set_result(promises)

    async def _post_all(self, parts: Sequence[Part]) -> list[Promise]:
        await self._holder.ready()
        first = self._next_seq_id
        if len(parts) == 1:
            call = await self._encode(parts[0], first)
            self._next_seq_id += 1
            return [await self._post(parts[0], call)]
        # Every chunk is posted even when one is refused: a missing number would stall the model.
        self._next_seq_id += len(parts)
        if not self._holder.flags.parallel_fwdbwd_chunks:
            results: list[Promise | BaseException] = []
            for offset, part in enumerate(parts):
                results.append(await self._attempt(part, first + offset))
            return _all_or_raise(results)
        rest = await asyncio.gather(
            *(self._attempt(part, first + n) for n, part in enumerate(parts) if n > 0)
        )
        return _all_or_raise([await self._attempt(parts[0], first), *rest])

    async def _attempt(self, part: Part, seq_id: int) -> Promise | BaseException:
        try:
            return await self._post(part, await self._encode(part, seq_id))
        except Exception as exc:
            return exc

    async def _encode(self, part: Part, seq_id: int) -> Call:
        """Large bodies are built on another thread, so heartbeats and polls go on meanwhile."""
        if part.size_bytes <= _ENCODE_ON_LOOP_BYTES:
            return part.encode(seq_id)
        return await asyncio.to_thread(part.encode, seq_id)

    async def _post(self, part: Part, call: Call) -> Promise:
        started = time.monotonic()
        holder = self._holder
        if part.size_bytes:
            async with holder.budgets.training.hold(part.size_bytes):
                reply = await holder.transport.call(call)
        else:
            reply = await holder.transport.call(call)
        promise = parse(reply, types.UntypedAPIFuture)
        return Promise(promise.request_id, time.monotonic() - started)


def _all_or_raise(results: Sequence[Promise | BaseException]) -> list[Promise]:
    promises = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        promises.append(result)
    return promises


def _retrieved(future: asyncio.Future[list[Promise]]) -> None:
    if not future.cancelled():
        future.exception()
