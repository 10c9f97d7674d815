"""Tokens while they are generated: server-sent events turned into a Python iterator (R27).

One task on the background loop reads the stream and hands its events over; the caller iterates in
a thread or in an event loop of its own. A broken stream is an error, never a short result: tokens
that were already handed out cannot be taken back by a silent retry.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from tinkex import events, types
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.options import CallLimits, Options, check_options
from tinkex.client.session.polling import failure
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    InvalidInputError,
    NotSupportedError,
)

if TYPE_CHECKING:
    from tinkex.client.sampling.sampling_client import SamplingClient


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """New tokens of one sample."""

    sample_index: int
    tokens: list[int]
    logprobs: list[float]


_END = object()


class SampleStream:
    """Iterate with `for` or `async for`, once. `.result` is the whole answer afterwards."""

    def __init__(
        self, client: SamplingClient, request: types.SampleRequest, options: Options = None
    ) -> None:
        if options:
            check_options(options)
        self._options = options
        self._client = client
        self._request = request
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._result: types.SampleResponse | None = None
        self._future: APIFuture[None] | None = None

    @property
    def result(self) -> types.SampleResponse:
        """All sequences, once the iteration is over."""
        if self._result is None:
            raise RuntimeError("The stream has not ended yet: iterate it to the end first.")
        return self._result

    # -- reading

    def __iter__(self) -> Iterator[StreamedTokens]:
        self._start()
        assert self._future is not None
        try:
            while (item := self._items.get()) is not _END:
                yield item
            self._future.result()
        finally:
            self._future.cancel()

    async def __aiter__(self) -> AsyncIterator[StreamedTokens]:
        self._start()
        assert self._future is not None
        try:
            while True:
                try:
                    item = self._items.get_nowait()
                except queue.Empty:
                    item = await asyncio.to_thread(self._items.get)
                if item is _END:
                    break
                yield item
            await self._future
        finally:
            self._future.cancel()

    def _start(self) -> None:
        if self._future is not None:
            raise RuntimeError("A stream can be iterated once; call stream() again.")
        self._future = self._client.holder.spawn(self._read, CallLimits.of(self._options))
        # However it ends, also before it began (a closed client): the reader must hear of it.
        self._future.add_done_callback(lambda _: self._items.put(_END))

    # -- on the background loop

    async def _read(self, waiting: Waiting) -> None:
        holder = self._client.holder
        if not holder.flags.tinkex_sample_stream:
            raise NotSupportedError(
                "this server cannot stream; use sample(), which returns all tokens at once"
            )
        call = await self._client._stream_call(self._request, self._options)
        async with holder.transport.stream(call) as lines:
            kind = ""
            async for line in lines:
                if line.startswith("event:"):
                    kind = line[6:].strip()
                elif line.startswith("data:") and self._reads(kind, line[5:], waiting):
                    return
        raise APIConnectionError("The stream ended before the sample did. Sample again.")

    def _reads(self, kind: str, text: str, waiting: Waiting) -> bool:
        """Handle one event; True when it was the last."""
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError as exc:
            raise APIConnectionError("The stream ended inside an event. Sample again.") from exc
        try:
            return self._take(kind, event, waiting)
        except (InvalidInputError, KeyError, TypeError, AttributeError) as exc:
            raise APIResponseValidationError(
                f"The server's event {kind!r} cannot be read: {exc!r}", body=event
            ) from exc

    def _take(self, kind: str, event: dict[str, Any], waiting: Waiting) -> bool:
        if kind == "progress":
            state, reason = "paused_capacity", str(event.get("reason"))
            waiting.hear(state, reason)
            events.emit("queue.change", request_id="", state=state, reason=reason)
            return False
        if kind == "tokens":
            self._items.put(
                StreamedTokens(event["sample_index"], event["tokens"], event["logprobs"])
            )
            return False
        if kind == "done":
            whole = types.SampleResponse._from_dict(event)
            self._result = self._client._stamped(whole, event.get("snapshot"))
            return True
        if kind == "error":
            raise failure(event)
        raise APIResponseValidationError(f"unknown stream event {kind!r}", body=event)
