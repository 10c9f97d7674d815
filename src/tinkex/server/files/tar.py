"""A folder as a tar stream that is never written to disk and can be read from any offset.

The archive of unchanged files is the same bytes every time, so a broken download goes on where it
stopped. Knows files and offsets, not HTTP.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    size: int
    data: bytes = b""
    file: Path | None = None


class FolderTar:
    def __init__(self, folder: Path) -> None:
        self._parts: list[_Part] = []
        for file in sorted(f for f in folder.rglob("*") if f.is_file()):
            self._add(file, file.relative_to(folder).as_posix())
        self._parts.append(_Part(2 * BLOCK, bytes(2 * BLOCK)))
        self.size_bytes = sum(part.size for part in self._parts)

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` up to and without `end`, in pieces."""
        offset = 0
        for part in self._parts:
            low, high = max(start - offset, 0), min(end - offset, part.size)
            if low < high:
                yield from _slice(part, low, high)
            offset += part.size

    def _add(self, file: Path, name: str) -> None:
        # Nothing of the file but its name and size. A copy that was fetched anew from the object
        # store has other times, and a download that goes on must find the bytes that it began with.
        info = tarfile.TarInfo(name)
        info.size = file.stat().st_size
        info.mode = 0o644
        header = info.tobuf(tarfile.PAX_FORMAT)
        self._parts.append(_Part(len(header), header))
        self._parts.append(_Part(info.size, file=file))
        padding = -info.size % BLOCK
        self._parts.append(_Part(padding, bytes(padding)))


def _slice(part: _Part, low: int, high: int) -> Iterator[bytes]:
    if part.file is None:
        yield part.data[low:high]
        return
    with part.file.open("rb") as stream:
        stream.seek(low)
        left = high - low
        while left:
            piece = stream.read(min(CHUNK, left))
            if not piece:
                raise OSError(f"{part.file} became shorter while it was read")
            left -= len(piece)
            yield piece
