"""A private folder beside a file that is being written, and the removal of those a crash left.

A scratch folder has mode 0700 and a name nobody can guess, so other users neither read what lies in
it nor plant a link there. Its maker holds a lock in it that the system drops with the process; the
next `scratch_folder` in the same place removes those whose lock is free. A folder is removed only
if it is this user's and holds nothing but the files it was made for: in a place where others write,
anybody can move a folder under such a name. POSIX only. Blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)
PREFIX = ".backup-"
LOCK = "in-use.lock"
_NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # as tempfile.mkdtemp names them


@contextlib.contextmanager
def scratch_folder(parent: Path, names: Collection[str]) -> Iterator[Path]:
    """Make a folder in `parent` for files called `names`, and remove it with them at the end.

    Folders in `parent` that an earlier process of this user left behind are removed first.
    """
    remove_abandoned(parent, names)
    # Between its making and its locking another process may remove it as abandoned; then once more.
    while (held := _Held.take(Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX)))) is None:
        pass
    try:
        yield held.path
    finally:
        held.remove(names)


def remove_abandoned(parent: Path, names: Collection[str]) -> None:
    """Remove the scratch folders of this user in `parent` that no running process holds."""
    for path in parent.iterdir():
        try:
            if _NAME.fullmatch(path.name) and (held := _Held.take(path, names)) is not None:
                held.remove(names)
        except OSError as exc:
            log.warning("%s, left by a backup that was killed, stays: %s", path, exc)


@dataclass(frozen=True, slots=True)
class _Held:
    """A scratch folder whose lock this process has, as open descriptors: a path may be swapped."""

    path: Path
    folder: int
    lock: int | None
    """None on a file system without locks, where abandoned folders stay."""

    @classmethod
    def take(cls, path: Path, only: Collection[str] | None = None) -> _Held | None:
        """Lock the folder, or give None when another process has it or removed it.

        With `only`, also None for a folder that is not this user's, or holds other files.
        """
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed, a link, a file, or closed to us
            return None
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(os.close, folder)
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                if only is None or _is_ours(folder, only):
                    held = cls(path, folder, _lock(folder, is_needed=only is not None))
                    unless_taken.pop_all()
                    return held
        return None

    def remove(self, names: Collection[str]) -> None:
        """Remove the folder with the files that may lie in it, the lock last, and let go of it."""
        try:
            for name in (*names, LOCK):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.folder)
            os.rmdir(self.path)
        except OSError as exc:
            log.warning("%s, a folder of `tinkex admin backup`, stays: %s", self.path, exc)
        finally:
            os.close(self.folder)
            if self.lock is not None:
                os.close(self.lock)


def _is_ours(folder: int, names: Collection[str]) -> bool:
    about = os.fstat(folder)
    # Less the bit that a folder takes over from a parent whose group is passed on.
    mode = stat.S_IMODE(about.st_mode) & ~stat.S_ISGID
    is_private = about.st_uid == os.geteuid() and mode == 0o700
    return is_private and set(os.listdir(folder)) <= {*names, LOCK}


def _lock(folder: int, *, is_needed: bool) -> int | None:
    """Take the lock of a folder.

    Raises:
        BlockingIOError: Another process has it.
        FileNotFoundError: Another process removed it, and the folder.
    """
    import fcntl

    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between our open and our flock its holder may have removed the file and let go of it: the
        # lock that we have then is of a file without a name, and keeps nobody out.
        if os.stat(LOCK, dir_fd=folder).st_ino != os.fstat(lock).st_ino:
            raise FileNotFoundError(LOCK)
    except OSError as exc:
        os.close(lock)
        if is_needed or isinstance(exc, FileNotFoundError | BlockingIOError):
            raise
        return None
    return lock
