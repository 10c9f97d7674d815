"""The data folder: names of folders in it, and the quarantine for what nobody lists.

Rows hold names relative to the data folder; only here do they become paths, and only paths inside
it. Nothing is removed here but what the caller was told to remove by the database; a folder that
no row knows (left by a crash, or known to another, older or lost database) moves to
`quarantine/<time>/`, from where it can be moved back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from functools import lru_cache
from pathlib import Path

from tinkex.errors import EngineError

log = logging.getLogger(__name__)
MAX_REMEMBERED = 4096
_STAMP = "%Y%m%d-%H%M%S"
_LOT = re.compile(r"\d{8}-\d{6}")


class DataFolder:
    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir.resolve()
        self.quarantine_root = self.root / "quarantine"
        # Every sample asks, and always for the same few; pathlib takes its time.
        self.path = lru_cache(MAX_REMEMBERED)(self._path)

    def _path(self, name: str) -> Path:
        """Where the folder of a row lies.

        Raises:
            EngineError: Its name leads out of the data folder.
        """
        path = self.root / name
        if Path(name).is_absolute() or ".." in Path(name).parts or path == self.root:
            raise EngineError(
                "A stored folder lies outside the server's data folder, so it is not read. "
                "Whoever runs the server can move it into the data folder."
            )
        return path

    def name(self, path: Path) -> str:
        """The name by which a row knows a folder made here."""
        return path.relative_to(self.root).as_posix()

    def remove(self, name: str) -> bool:
        """Remove a folder that the database says was deleted; False when it is still there."""
        try:
            path = self.path(name)
        except EngineError:
            log.error("not removing %s: it lies outside %s", name, self.root)
            return True
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    def quarantine(self, folder: Path) -> None:
        """Set a folder aside that no row points at."""
        target = self.quarantine_root / time.strftime(_STAMP, time.gmtime()) / self.name(folder)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
        except OSError as exc:
            log.warning("%s is in no listing and stays where it is: %s", folder, exc.strerror)
            return
        log.warning("%s is in no listing; it was moved to %s", self.name(folder), target)

    def purge_quarantine(self, before: float) -> int:
        """Remove what was set aside before a moment; gives how many lots."""
        limit = time.strftime(_STAMP, time.gmtime(before))
        lots = self.quarantine_root.iterdir() if self.quarantine_root.is_dir() else ()
        old = [lot for lot in lots if _LOT.fullmatch(lot.name) and lot.name < limit]
        for lot in old:
            log.warning("%s was in quarantine long enough and is removed", lot)
            shutil.rmtree(lot, ignore_errors=True)
        return len(old)


def folder_size(folder: Path) -> int:
    """The bytes of its files; one that is not there, or goes while we look, has none."""
    total = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(inside, name)).st_size
    return total
