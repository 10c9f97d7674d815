"""What a connection may cost before anybody knows whose it is.

Anybody can open connections, send headers that never end, send a body a byte at a time, or not
read the answer. `Guarded` is uvicorn's protocol with a bound on each: bytes and seconds of the
head, seconds between two pieces of a body and for all of it, seconds in which an answer is not read
at all and for all of it, requests that wait behind another, and connections per address. It knows
bytes and clocks, not routes or keys.

uvicorn writes the head and the body of an answer one after the other, and each write of a few bytes
costs both sides more than the bytes do. `Joined` lets a head wait for a body that is there already.

A request costs no timer: a connection notes until when it may be silent, and one look at all of
them, a few times within the shortest of these bounds, ends those that were silent for longer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
SPARE_FILES = 256
"""Files that are never given to connections: the database, checkpoints, pipes to workers."""
WANTED_FILES = 65_536
LOOK_EVERY_S = 1.0
HOLD_HEAD = "tinkex.hold_head"
"""In a request's scope: a function to call before an answer whose body is there with its head."""
SLOWEST = 16 * 1024
"""Bytes a second at which a body may come, or an answer be read, for as long as it takes."""
PIECE_BYTES = 256 * 1024
"""Of an answer that is given to a connection at a time; the rest of it waits outside."""
MAX_PIPELINED = 16
"""Requests on a connection that wait behind the one under way. A head is a few bytes, and becomes
kilobytes."""
_REFUSED = (
    "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n"
    "connection: close\r\n\r\n{body}"
)
_BODY = '{{"detail": "{text}", "code": "{code}", "category": "user"}}'


def raise_file_limit() -> int:
    """Let this process open as many files as it may; gives how many that are."""
    try:
        import resource
    except ImportError:  # Windows: no such limit
        return WANTED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else WANTED_FILES


@dataclass(kw_only=True)
class ConnectionLimits:
    """The bounds of one server's connections, and how many each address has open."""

    max_per_address: int = 2048
    max_connections: int = WANTED_FILES - SPARE_FILES
    head_timeout_s: float = 20.0
    """From the first byte (or the connection) to the end of the headers."""
    body_pause_s: float = 30.0
    """Between two pieces of a body, while we read."""
    body_timeout_s: float = 120.0
    """For a whole body, beside what its bytes take at `SLOWEST`: room in memory waits for it."""
    write_pause_s: float = 120.0
    """In which nothing of an answer is taken."""
    open: Counter[str] = field(default_factory=Counter)
    num_refused: int = 0
    _watched: set[Guarded] = field(default_factory=set)
    _is_looking: bool = False

    @property
    def num_open(self) -> int:
        return len(self._watched)

    def admit(self, connection: Guarded, address: str) -> bool:
        if self.open[address] >= self.max_per_address or self.num_open >= self.max_connections:
            self.num_refused += 1
            if self.num_refused & (self.num_refused - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                logger.warning("%d connections refused, now from %s", self.num_refused, address)
            return False
        self.open[address] += 1
        self._watched.add(connection)
        if not self._is_looking:
            self._is_looking = True
            self._look_later(connection.loop)
        return True

    def release(self, connection: Guarded, address: str) -> None:
        self._watched.discard(connection)
        self.open[address] -= 1
        if self.open[address] <= 0:
            del self.open[address]

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        shortest_s = min(self.head_timeout_s, self.body_pause_s, self.write_pause_s)
        loop.call_later(min(LOOK_EVERY_S, shortest_s / 4), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        for connection in tuple(self._watched):
            connection.end_if_silent(now)
        self._is_looking = bool(self._watched)
        if self._is_looking:
            self._look_later(loop)


def guarded(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The class of connections for uvicorn's `http` option."""
    return cast(type[asyncio.Protocol], partial(Guarded, limits))


class Joined:
    """A transport that writes two pieces at once when it is told to."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing  # asked several times a request
        self._is_holding = False
        self._held: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def hold(self) -> None:
        """Keep the next piece until the one after it."""
        self._is_holding = True

    def write(self, data: bytes) -> None:
        if self.is_closing():  # uvicorn tells only the last of several requests that it is over
            self._held = None
        elif self._is_holding:
            self._is_holding, self._held = False, data
        elif self._held is not None:
            held, self._held = self._held, None
            self._transport.writelines((held, data))
        else:
            self._transport.write(data)


# uvicorn has no setting for any of these bounds, and ASGI shows a request only when its head is
# whole. So this class overrides methods that uvicorn keeps private: test_strangers holds each bound
# over real sockets, and fails when a release of uvicorn moves one of them.
class Guarded(HttpToolsProtocol):
    """uvicorn's connection with the bounds of `ConnectionLimits`."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self._address: str | None = None
        self._head_bytes = 0
        self._read_bytes = 0
        self._in_head = True
        self._silent_until = math.inf
        self._unread_until = math.inf
        self._when_silent: Callable[[], None] = self._late_head
        self._body_ends_at = 0.0
        self._answer_ends_at = math.inf

    # ------------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._joined = Joined(transport)
        self.transport = cast(asyncio.Transport, self._joined)
        address = self.client[0] if self.client else ""
        if not self.limits.admit(self, address):
            transport.abort()
            return
        self._address = address
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self.limits.release(self, self._address)
            self._address = None
        self.resume_writing()
        super().connection_lost(exc)

    def end_if_silent(self, now: float) -> None:
        """Called now and then."""
        if now >= self._unread_until:
            self.transport.abort()
        elif now >= self._silent_until:
            self._silent_until = math.inf
            self._when_silent()

    # ------------------------------------------------------------------------ the head

    def _expect_head(self) -> None:
        self._silent_until = time.monotonic() + self.limits.head_timeout_s
        self._when_silent = self._late_head

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._read_bytes = len(data)
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # What came whole is under way by now; only for the rest of a request is there a time.
        if not self._in_head:
            pause_ends_at = time.monotonic() + self.limits.body_pause_s
            self._silent_until = min(pause_ends_at, self._body_ends_at)
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse("431 Request Header Fields Too Large", "too_large", _HEAD_TEXT)
        elif self._head_bytes and self._when_silent != self._late_head:
            self._expect_head()

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        # Only what came with more bytes than a head may have can have too large a head.
        may_be_large = self._head_bytes > MAX_HEAD_BYTES or self._read_bytes > MAX_HEAD_BYTES
        self._in_head, self._head_bytes = False, 0
        if len(self.headers) > MAX_HEADERS or (may_be_large and self._has_large_head()):
            self._refuse("431 Request Header Fields Too Large", "too_large", _HEAD_TEXT)
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            # Anything raised ends the parsing: what follows in this piece is thousands of heads.
            raise ConnectionAbortedError(f"{MAX_PIPELINED} requests wait on this connection")
        self._body_ends_at = time.monotonic() + self.limits.body_timeout_s
        self._when_silent = self._late_body
        self.scope[HOLD_HEAD] = self._joined.hold  # type: ignore[literal-required]
        super().on_headers_complete()

    def _has_large_head(self) -> bool:
        size = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.url) + size > MAX_HEAD_BYTES

    # ------------------------------------------------------------------------ the body

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        self._body_ends_at += len(body) / SLOWEST
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._silent_until = math.inf
        if self.transport.is_closing():
            return
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before all of it had come
            self._keep()

    def _late_head(self) -> None:
        seconds = f"{self.limits.head_timeout_s:g}"
        text = f"The headers did not end within {seconds} s."
        # A connection on which nothing was ever said is closed without a word.
        if self._head_bytes:
            self._refuse("408 Request Timeout", "too_slow", text)
        else:
            self.transport.close()

    def _late_body(self) -> None:
        now = time.monotonic()
        if self.flow.read_paused and now < self._body_ends_at:  # our turn, not the sender's
            self._silent_until = min(now + self.limits.body_pause_s, self._body_ends_at)
            return
        self.transport.abort()

    # ------------------------------------------------------------------------ the answer

    def on_response_complete(self) -> None:
        """As uvicorn's, which has a timer for each connection that is kept, and stops it again."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self._answer_ends_at = math.inf
        self.cycle.body = bytearray()  # of a body that was refused, a piece may be here
        self.flow.resume_reading()
        if self._in_head and not self._head_bytes:
            self._keep()

    def _keep(self) -> None:
        """Wait for the next request for as long as a connection may be idle."""
        self._silent_until = time.monotonic() + self.timeout_keep_alive
        self._when_silent = self.timeout_keep_alive_handler

    def pause_writing(self) -> None:
        super().pause_writing()
        pause_ends_at = time.monotonic() + self.limits.write_pause_s
        if self._answer_ends_at == math.inf:
            self._answer_ends_at = pause_ends_at
        self._unread_until = min(pause_ends_at, self._answer_ends_at)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._answer_ends_at += PIECE_BYTES / SLOWEST
        self._unread_until = math.inf

    # ------------------------------------------------------------------------ tools

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _refuse(self, status: str, code: str, text: str) -> None:
        if self.transport.is_closing():
            return
        body = _BODY.format(text=text, code=code)
        answer = _REFUSED.format(status=status, size=len(body), body=body)
        self.transport.write(answer.encode())
        self.transport.close()


_HEAD_TEXT = f"URL and headers may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} lines."
