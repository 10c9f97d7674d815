"""Bytes with their content type, and zstd with a limit on what it may unpack to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import zstandard

from tinkex.errors import WireError
from tinkex.types.fields.value import short

DEFAULT_MAX_BYTES = 32 * 1024 * 1024
"""Most bytes a body may have after decompression, unless the caller allows more."""

# Larger windows cost the reader memory before a single byte is checked; ours and the official
# SDK's compressor stay far below.
_MAX_WINDOW_BYTES = 8 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


class BodyTooLargeError(WireError):
    """A body has more bytes than the reader allows, compressed or not."""

    code = "too_large"


class Body(NamedTuple):
    """The body of an HTTP message: the bytes and the two headers that explain them."""

    content: bytes
    content_type: str
    content_encoding: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": self.content_type}
        if self.content_encoding is not None:
            headers["Content-Encoding"] = self.content_encoding
        return headers

    def compressed(self, level: int = 3) -> Body:
        """The same body under zstd."""
        packed = zstandard.ZstdCompressor(level=level).compress(self.content)
        return Body(packed, self.content_type, "zstd")


def unpack(
    content: bytes, content_encoding: str | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> bytes:
    """Undo a content encoding, refusing anything larger than `max_bytes`."""
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "zstd":
        return _unzstd(content, max_bytes)
    if encoding != "identity":
        raise WireError(f"content encoding {short(encoding)} is not known; use zstd or none")
    if len(content) > max_bytes:
        raise BodyTooLargeError(_too_large(len(content), max_bytes))
    return content


def frame_size(content: bytes) -> int | None:
    """The size that the first zstd frame says it unpacks to; None where it does not say."""
    try:
        size = zstandard.frame_content_size(content)
    except zstandard.ZstdError as exc:
        raise WireError(f"the body is not valid zstd: {exc}") from exc
    return size if size >= 0 else None


def unpacked_size(content: bytes, *, max_bytes: int) -> int:
    """The size of all zstd frames together once unpacked, a piece at a time in memory."""
    return sum(map(len, _pieces(content, max_bytes)))


def _unzstd(content: bytes, max_bytes: int) -> bytes:
    declared = frame_size(content) or 0
    if declared > max_bytes:
        raise BodyTooLargeError(_too_large(declared, max_bytes))
    # The declared size is only a claim, so the pieces are counted too; and the reader ends
    # without an error where a frame is cut short.
    unpacked = b"".join(_pieces(content, max_bytes))
    if len(unpacked) < declared:
        raise WireError(f"the zstd body is cut short: {len(unpacked)} of {declared} bytes")
    return unpacked


def _pieces(content: bytes, max_bytes: int) -> Iterator[bytes]:
    total = 0
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        reader = decompressor.stream_reader(content, read_across_frames=True)
        while part := reader.read(_CHUNK_BYTES):
            total += len(part)
            if total > max_bytes:
                raise BodyTooLargeError(_too_large(total, max_bytes))
            yield part
    except zstandard.ZstdError as exc:
        if "too much memory" in str(exc):
            raise WireError(
                f"the zstd window of the body is larger than {_MAX_WINDOW_BYTES >> 20} MiB. "
                "Compress with a level up to 19 and without long-distance matching."
            ) from exc
        raise WireError(f"the body is not valid zstd: {exc}") from exc


def _too_large(size: int, max_bytes: int) -> str:
    return f"the body has {size} bytes or more, the limit is {max_bytes}. Send smaller chunks."
