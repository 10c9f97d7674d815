"""Which samples were promised and not yet handed out, in a file that outlives the process.

A sample costs too little for a row in the database. What a crash loses is its result; this file
remembers that it was promised, so that a client that waits for it is told at once and asks again.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("tinkex.store")


class SampleLedger:
    """A file with one short line per event, written through to the kernel.

    A killed process loses nothing, and a power cut loses promises nobody can still wait for.
    """

    MAX_BYTES = 8_000_000

    def __init__(self, file: Path) -> None:
        self._path = file
        self._open: dict[str, None] = {}
        self._compacted_bytes = 0
        self._size_bytes = 0  # without a last line that a crash tore
        self.lost = self._read()
        """What an earlier process promised and never handed out."""
        self._open.update(
            dict.fromkeys(self.lost)
        )  # lost after the next crash too, until asked for
        self._file = file.open("ab", buffering=0)
        self._file.truncate(self._size_bytes)
        self._file.seek(0, os.SEEK_END)
        self._compact()

    def _read(self) -> list[str]:
        promised: dict[str, None] = {}
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        self._size_bytes = sum(len(line) + 1 for line in lines[:-1])
        for line in lines[:-1]:  # a torn last line was never acknowledged
            request_id = line[1:].decode(errors="replace")
            if line[:1] == b"+":
                promised[request_id] = None
            else:
                promised.pop(request_id, None)
        return list(promised)

    def promised(self, request_id: str) -> None:
        """Note a promise before it is given.

        Raises:
            OSError: There is no room to note it; nothing is promised then.
        """
        self._open[request_id] = None  # before the write, which may rewrite the file from this
        try:
            self._write(b"+" + request_id.encode() + b"\n")
        except OSError:
            del self._open[request_id]
            raise

    def handed_out(self, request_ids: Iterable[str]) -> None:
        """Note the ends of promises, those it knows, in one write."""
        known = [name for name in request_ids if self._open.pop(name, "") is None]
        if not known:
            return
        try:
            self._write(b"".join(b"-" + name.encode() + b"\n" for name in known))
        except OSError as exc:  # after a crash they count as lost, and are asked for by nobody
            log.warning("cannot note that %d were handed out: %s", len(known), exc.strerror)

    def _write(self, lines: bytes) -> None:
        try:
            if self._file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(self._size_bytes)  # half a line would spoil the next
            self._file.seek(self._size_bytes)
            raise
        self._size_bytes += len(lines)
        # Twice what was left the last time: with more open promises than MAX_BYTES hold, every
        # write would rewrite the whole file.
        if self._size_bytes > max(self.MAX_BYTES, 2 * self._compacted_bytes):
            self._compact()

    def _compact(self) -> None:
        aside = self._path.with_suffix(".new")
        lines = b"".join(b"+" + request_id.encode() + b"\n" for request_id in self._open)
        file = aside.open("wb", buffering=0)
        try:
            if file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            aside.rename(self._path)
        except OSError as exc:
            file.close()
            aside.unlink(missing_ok=True)
            log.warning("%s stays as long as it is: %s", self._path, exc.strerror)
            return
        self._file.close()
        self._file = file
        self._compacted_bytes = self._size_bytes = len(lines)

    def close(self) -> None:
        self._file.close()
