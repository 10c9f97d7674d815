"""Results of many samples in one answer, an extension of ours, both ways.

    uint32 LE header length | header JSON | payloads, joined

The header is {"cursor", "completions": [{"state": "finished", "request_id", "size"} | {"state":
"failed", "request_id", "error", "category"}, ...]}. A finished one of size 0 was too large to send
along and is fetched by /retrieve_future. Without completions there is also "waiting": [{
"request_id", "queue_state", "queue_state_reason"}].
"""

from __future__ import annotations

import struct
from typing import Any

import orjson

from tinkex.errors import WireError

FRAMES = "application/x-tinkex-frames"
MAX_BYTES = 16_000_000
"""Payload bytes after which an answer is full."""
MAX_ITEM_BYTES = 1_000_000
"""A larger payload travels alone."""


class Writer:
    """Gathers one answer."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._payloads: list[bytes] = []
        self._size_bytes = 0

    def add(self, request_id: str, payload: bytes) -> bool:
        """Take a finished result; False when the answer is full."""
        size = len(payload) if len(payload) <= MAX_ITEM_BYTES else 0
        if self._size_bytes + size > MAX_BYTES:
            return False
        self._size_bytes += size
        if size:
            self._payloads.append(payload)
        self._entries.append({"state": "finished", "request_id": request_id, "size": size})
        return True

    def add_failure(self, request_id: str, error: str, category: str) -> None:
        entry = {"state": "failed", "request_id": request_id, "error": error, "category": category}
        self._entries.append(entry)

    def content(self, cursor: int, waiting: list[dict[str, str]]) -> bytes:
        about: dict[str, Any] = {"cursor": cursor, "completions": self._entries}
        if not self._entries:
            about["waiting"] = waiting
        header = orjson.dumps(about)
        return b"".join([struct.pack("<I", len(header)), header, *self._payloads])


def read(content: bytes) -> tuple[dict[str, Any], list[bytes | None]]:
    """The header, and the payload of each of its completions where it was sent along."""
    try:
        (length,) = struct.unpack_from("<I", content)
        header = orjson.loads(content[4 : 4 + length])
        entries = header["completions"]
        sizes = [int(entry.get("size") or 0) for entry in entries]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise WireError(f"the frames cannot be read: {exc!r}") from exc
    payloads, at = memoryview(content), 4 + length
    if min(sizes, default=0) < 0 or at + sum(sizes) != len(content):
        raise WireError("the sizes of the frames do not add up")
    found: list[bytes | None] = []
    for size in sizes:
        found.append(bytes(payloads[at : at + size]) if size else None)
        at += size
    return header, found
