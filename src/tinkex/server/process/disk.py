"""How much room the data folder has, and how a disk that takes no more is spoken of.

New work is refused a little before the disk is full, because what was accepted needs some room to
end well. Two files of a few megabytes are kept in reserve: they are given up for deletions and for
what administrators do, which write a little before they free much, and made again once there is
room. The second one is the administrators' alone: anybody may delete nothing, and then fill the
room.
Others may eat that room too, so every write can still fail: `trouble` recognises such a failure
wherever it comes from (the operating system, SQLite, PostgreSQL, a worker's message) and puts it in
words. Who retries and who gives up is decided where the write was made.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy.exc import DBAPIError, OperationalError

from tinkex.errors import EngineError, TinkerError

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
RESERVES = ("reserve.bin", "reserve.admin.bin")
"""Files in the data folder that are given up so that a full disk can be emptied: the first one for
deletions, the second one for administrators."""
RESERVE_BYTES = 4 * 1024 * 1024
"""Of each."""
_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SIGNS = (
    "database or disk is full",
    "disk i/o error",
    "no space left on device",
    "disk quota exceeded",
    "file too large",
)
_ADVICE = "Free space there, for example by deleting old checkpoints, and send the request again"


class DiskFullError(TinkerError, OSError):
    """New work is refused for lack of room."""

    code = "disk_full"


class Room:
    """The free space of one folder, looked at no more than twice a second."""

    def __init__(
        self,
        folder: Path,
        min_free_bytes: int,
        *,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._free_bytes = free_bytes
        # The monotonic clock may begin near 0, and the first call must look.
        self._looked_at = -LOOK_EVERY_S
        self._free = 0
        self._was_short = False

    def require(self) -> None:
        """Refuse new work while there is too little room.

        Raises:
            DiskFullError: Answered with 507. Clients send the same request again for minutes, so
                that a disk that is cleared in time costs them a pause.
        """
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at, self._free = now, self._free_bytes(self._folder)
            self._log_change(self._free < self._min_free_bytes)
        if self._free >= self._min_free_bytes:
            return
        raise DiskFullError(
            f"The disk of the server's data folder is nearly full: "
            f"{_mb(self._free)} free, and {_mb(self._min_free_bytes)} are kept for what was "
            f"accepted before. {_ADVICE}."
        )

    def keep_reserves(self) -> None:
        """Make the reserves that are not there, if there is room enough. Blocks for a moment."""
        for name in RESERVES:
            self._keep(self._folder / name)

    def _keep(self, file: Path) -> None:
        if (
            file.exists()
            or self._free_bytes(self._folder) < self._min_free_bytes + 2 * RESERVE_BYTES
        ):
            return
        aside = file.with_suffix(".new")
        try:
            # Bytes, not a hole: only written ones take room that can be given back.
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as stream:
                stream.write(b"\0" * RESERVE_BYTES)
            aside.replace(file)
        except OSError as exc:
            logger.warning("no reserve of disk space is kept: %s", exc.strerror)
            aside.unlink(missing_ok=True)

    def make_way(self, *, is_admin: bool) -> None:
        """Give a reserve up if there is hardly any room, for a call that may free some."""
        for name in RESERVES if is_admin else RESERVES[:1]:
            if self._free_bytes(self._folder) >= RESERVE_BYTES:
                return
            try:
                (self._folder / name).unlink()
            except FileNotFoundError:
                continue
            logger.warning("the disk is full; %s is given up so that it can be emptied", name)

    def _log_change(self, short: bool) -> None:
        if short and not self._was_short:
            logger.error(
                "%s has %s left; new work is refused until there are %s (min_free_bytes)",
                self._folder,
                _mb(self._free),
                _mb(self._min_free_bytes),
            )
        elif self._was_short and not short:
            logger.info("%s has room again: %s", self._folder, _mb(self._free))
        self._was_short = short


def trouble(exc: BaseException) -> str | None:
    """The text for a client whose write found no room; None for every other failure."""
    for link in _chain(exc):
        if isinstance(link, DiskFullError):
            return str(link)
        if isinstance(link, OSError) and link.errno in _ERRNOS:
            return _said(link.strerror or "no room")
        # `disk_full` in PostgreSQL's table of error codes.
        if getattr(link, "sqlstate", None) == "53100":
            return _said("the database has no room")
        text = str(link).lower()
        sign = next((sign for sign in _SIGNS if sign in text), None)
        if sign is not None:
            return _said(sign)
    return None


def may_pass(exc: BaseException) -> bool:
    """Whether the same write may succeed later: no room, or a database that is away."""
    return isinstance(exc, OperationalError) or trouble(exc) is not None


def describe(exc: BaseException) -> str:
    """An unforeseen failure as a client may read it. SQL, parameters and paths stay in the log."""
    if isinstance(exc, EngineError):
        return str(exc)
    return trouble(exc) or f"The server failed ({type(exc).__name__}); its log says more."


def _said(cause: str) -> str:
    return f"The disk of the server's data folder takes no more ({cause}). {_ADVICE}."


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        if isinstance(exc, DBAPIError) and exc.orig is not None:
            yield exc.orig
        exc = exc.__cause__


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
