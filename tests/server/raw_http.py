"""HTTP/1.1 over one kept-alive connection, with next to no cost of its own: for load tests."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson


class Connection:
    def __init__(self, port: int, key: str = "tml-test") -> None:
        self._port = port
        self._key = key
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(
        self,
        path: str,
        body: Any,
        *,
        kind: str = "application/json",
        accept: str = "*/*",
        encoding: str = "identity",
    ) -> tuple[int, bytes]:
        """One request at a time, to a call of the API or a whole path. Gives status and body."""
        payload = body if isinstance(body, bytes) else orjson.dumps(body)
        where = path if path.startswith("/") else f"/api/v1/{path}"
        head = (
            f"POST {where} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {self._key}\r\n"
            f"content-type: {kind}\r\naccept: {accept}\r\ncontent-encoding: {encoding}\r\n"
            f"content-length: {len(payload)}\r\n\r\n"
        )
        try:
            return await self._answered(head.encode() + payload)
        except BaseException:
            self.close()  # closed by the server, or in the middle of an answer: of no more use
            raise

    async def _answered(self, request: bytes) -> tuple[int, bytes]:
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=1 << 24
            )
        assert self._reader is not None
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        sizes = [line for line in lines if line.lower().startswith(b"content-length")]
        size = int(sizes[0].split(b":")[1]) if sizes else 0  # a 204 has none
        return int(lines[0].split()[1]), await self._reader.readexactly(size)

    async def ok(self, path: str, body: Any, **kwargs: Any) -> Any:
        status, content = await self.post(path, body, **kwargs)
        assert status == 200, content
        return orjson.loads(content)

    async def settled(self, promise: dict[str, Any], accept: str = "*/*") -> bytes:
        """Poll until the promise is settled."""
        body = {"request_id": promise["request_id"]}
        while True:
            status, content = await self.post("retrieve_future", body, accept=accept)
            if status != 408:
                assert status == 200, content
                return content

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
