"""HTTP/1.1 over plain sockets, for servers reached without TLS.

Where every sample is a request of its own, most of the client's time goes into its HTTP client, so
this one does only what we need: keep-alive connections, one request at a time on each, fixed,
chunked or close-delimited answers, gzip, deflate and zstd. It stays as long as it needs less than
two thirds of the CPU of any client that could replace it, per small request: `http_clients` and the
figures `http1_vs_httpx` in `docs/benchmarks.md` (on 2026-11-18 aiohttp took 1.9 times as much,
pyqwest 2.4, httpx2 18, httpx 46). httpx still serves TLS, HTTP/2 and proxies. This does not follow
redirects, keep cookies or retry, but for one case: a kept connection that the server closed before
a byte of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import orjson
import zstandard

from tinkex.client.http.waiting_line import WaitingLine

_MAX_HEAD_BYTES = 65_536


class ProtocolError(ConnectionError):
    """The connection broke or the bytes on it are not HTTP."""


class NoConnectionError(ProtocolError):
    """There was no connection to break."""


class NoAnswerError(ProtocolError):
    """The server closed a new connection before a byte of an answer."""


class _Stale(ProtocolError):
    """A kept connection ended before the answer began; nothing of it was processed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Whatever a server answered."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    def json(self) -> Any:
        """The decoded body; None when it is not JSON."""
        try:
            return orjson.loads(self.content)
        except orjson.JSONDecodeError:
            return None


class _Connection(asyncio.Protocol):
    """A socket that carries at most one request at a time."""

    def __init__(self, pool: Http1Pool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._buffer = bytearray()
        self._status = 0
        self._headers: dict[str, str] | None = None
        self._body: list[bytes] = []
        self._left = 0
        self._mode = ""
        self._no_body = False
        self.num_requests = 0
        self.lost = False

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._pool.forget(self)
        answer = self._answer
        if answer is None or answer.done():
            return
        if self._mode == "close" and exc is None:
            self._finish()
        elif self._headers is None and not self._buffer and self.num_requests > 1:
            answer.set_exception(_Stale("the kept connection was closed"))
        elif self._headers is None and not self._buffer and exc is None:
            answer.set_exception(NoAnswerError("the server closed the connection unanswered"))
        else:
            what = "the answer" if self._headers is None else "its body"
            why = f": {exc}" if exc else ""
            answer.set_exception(ProtocolError(f"the server closed the connection in {what}{why}"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # bytes nobody asked for
            return
        try:
            if self._takes(data):
                self._finish()
        except (ValueError, IndexError, zlib.error, zstandard.ZstdError) as exc:
            self._fail(ProtocolError(f"the answer is not valid HTTP: {exc}"))

    # -- the pool's side

    def send(self, head: bytes, body: bytes | None, method: str) -> asyncio.Future[Reply]:
        assert self.transport is not None
        self.num_requests += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._headers = None
        self._no_body = method == "HEAD"
        self._mode = ""
        if body and len(body) > 16_384:
            self.transport.write(head)
            self.transport.write(body)
        else:
            self.transport.write(head + body if body else head)
        return self._answer

    def abort(self) -> None:
        self.lost = True
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, error: ProtocolError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()

    # -- parsing

    def _takes(self, data: bytes) -> bool:
        """Add to the answer; whether it is whole."""
        if self._headers is None:
            self._buffer += data
            if not self._read_head():
                return False
        elif self._mode == "chunked":
            self._buffer += data
        else:
            self._body.append(data)
            self._left -= len(data)
        if self._mode == "chunked":
            return self._read_chunks()
        if self._mode == "fixed" and self._left < 0:
            raise ValueError("more bytes than Content-Length")
        return self._mode == "fixed" and self._left == 0

    def _read_head(self) -> bool:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MAX_HEAD_BYTES:
                    raise ValueError("the head is too large")
                return False
            lines = self._buffer[:end].decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            version, status, *_ = lines[0].split(" ", 2)
            if not version.startswith("HTTP/1."):
                raise ValueError(f"unexpected {version[:20]!r}")
            self._status = int(status)
            if self._status >= 200:  # 100-continue and friends are followed by the real head
                break
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if version == "HTTP/1.0":
            headers.setdefault("connection", "close")
        self._headers = headers
        self._choose_mode(headers)
        return True

    def _choose_mode(self, headers: dict[str, str]) -> None:
        self._body = []
        if self._no_body or self._status in (204, 304):
            self._mode, self._left = "fixed", 0
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._mode = "chunked"
            return
        elif "content-length" in headers:
            self._mode, self._left = "fixed", int(headers["content-length"])
            if self._left < 0:
                raise ValueError("negative Content-Length")
        else:
            self._mode, self._left = "close", 0
        if self._buffer:
            self._body.append(bytes(self._buffer))
            self._left -= len(self._buffer)
            self._buffer.clear()

    def _read_chunks(self) -> bool:
        """Move whole chunks from the buffer to the body; whether the last one was there."""
        buffer = self._buffer
        while True:
            line_end = buffer.find(b"\r\n")
            if line_end < 0:
                return False
            size = int(bytes(buffer[:line_end]).split(b";", 1)[0], 16)
            if size == 0:
                if len(buffer) < line_end + 4 and buffer[line_end:] == b"\r\n":
                    return False
                end = buffer.find(b"\r\n\r\n", line_end)
                if end < 0:
                    return False
                del buffer[: end + 4]
                return True
            if len(buffer) < line_end + 2 + size + 2:
                return False
            self._body.append(bytes(buffer[line_end + 2 : line_end + 2 + size]))
            del buffer[: line_end + 2 + size + 2]

    def _finish(self) -> None:
        answer, headers = self._answer, self._headers
        assert answer is not None
        assert headers is not None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        encoding = headers.get("content-encoding")
        content = _decoded(body, encoding) if encoding and body else body
        reusable = headers.get("connection", "").lower() != "close" and self._mode != "close"
        if not answer.done():
            answer.set_result(Reply(self._status, headers, content))
        if reusable:
            self._pool.give_back(self)
        else:
            self.abort()


def _decoded(body: bytes, encoding: str) -> bytes:
    kind = encoding.strip().lower()
    if kind == "gzip":
        return zlib.decompress(body, zlib.MAX_WBITS | 16)
    if kind == "deflate":
        with contextlib.suppress(zlib.error):
            return zlib.decompress(body)
        return zlib.decompress(body, -zlib.MAX_WBITS)
    if kind == "zstd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    if kind == "identity":
        return body
    raise ValueError(f"unknown content encoding {encoding[:40]!r}")


class Http1Pool:
    """Keep-alive connections to the origin of a URL; a `Backend`. Lives on one event loop."""

    def __init__(
        self, url: str, *, max_connections: int = 1000, connect_timeout_s: float = 10.0
    ) -> None:
        parts = urlsplit(url)
        if parts.hostname is None:
            raise ValueError(f"no host in {url!r}")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._connect_timeout_s = connect_timeout_s
        self._host = parts.hostname
        self._port = parts.port or 80
        self._host_header = parts.netloc.rpartition("@")[2]
        self._max = max_connections
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening = 0
        self._line = WaitingLine()
        self._closed = False

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Reply:
        """Send one request to a URL of this origin; gives the answer with its body decoded.

        Raises:
            TimeoutError: No whole answer in time.
            OSError: The connection could not be made, or broke.
        """
        head = self._head(method, url.removeprefix(self._origin), headers, body)
        while True:
            connection = await self._acquire(min(self._connect_timeout_s, timeout_s))
            answer = connection.send(head, body, method)
            timer = asyncio.get_running_loop().call_later(timeout_s, _time_out, answer, timeout_s)
            try:
                return await answer
            except _Stale:
                continue  # only kept connections are stale, and each try uses one up
            except BaseException:
                connection.abort()
                raise
            finally:
                timer.cancel()

    def _head(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None
    ) -> bytes:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._host_header}"]
        for name, value in headers.items():
            if len(name) == 4 and name.lower() == "host":
                lines[1] = f"Host: {value}"  # the user's; two of them would be no request at all
            else:
                lines.append(f"{name}: {value}")
        if body is not None or method != "GET":
            lines.append(f"Content-Length: {len(body) if body else 0}")
        text = "\r\n".join(lines)
        # A line break in a value would smuggle in a header, or a whole request.
        if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
            raise ValueError("a header or the path holds a line break")
        return f"{text}\r\n\r\n".encode("latin-1")

    # -- connections

    async def _acquire(self, timeout_s: float) -> _Connection:
        while True:
            if self._closed:
                raise ProtocolError("the pool is closed")
            while self._idle:
                connection = self._idle.pop()
                if not connection.lost:
                    return connection
            if len(self._all) + self._opening < self._max:
                try:
                    return await self._open(timeout_s)
                except OSError as exc:
                    present = len(self._all) + self._opening
                    if exc.errno not in (errno.EMFILE, errno.ENFILE) or not present:
                        raise
                    # The process may open no more files: live with the connections there are.
                    self._max = present
                    continue
            await self._line.wait(1, lambda _: self._line.wake())

    async def _open(self, timeout_s: float) -> _Connection:
        self._opening += 1
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self), self._host, self._port
                )
        except TimeoutError as exc:
            raise NoConnectionError(f"no connection within {timeout_s:g} s") from exc
        finally:
            self._opening -= 1
            self._line.wake()
        if self._closed:
            connection.abort()
            raise ProtocolError("the pool is closed")
        self._all.add(connection)
        return connection

    def give_back(self, connection: _Connection) -> None:
        if self._closed or connection.lost:
            connection.abort()
            return
        self._idle.append(connection)
        self._line.wake()

    def forget(self, connection: _Connection) -> None:
        self._all.discard(connection)
        self._line.wake()

    async def close(self) -> None:
        self._closed = True
        for connection in tuple(self._all):
            connection.abort()
        while self._line.wake() is not None:
            pass  # each one finds the pool closed


def _time_out(answer: asyncio.Future[Reply], timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError(f"no answer within {timeout_s:g} s"))
