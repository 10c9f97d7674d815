"""Who may read what the server keeps: its own user, nobody else.

A data folder that the server makes has mode 0700, its files 0600. A folder that was there before
and holds no store is somebody's (a home, a mount) and keeps its mode; what is written into it is
closed all the same. The secrets that sign tokens and links are files here, not rows: a copy of the
database opens nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from tinkex.store import Store
from tinkex.store.binding import ID_FILE

log = logging.getLogger(__name__)
SECRET_BYTES = 32
_OURS = ("tinkex.db*", "samples.log*", "store.*", "secrets", "checkpoints", "ephemeral", "state")


def make_private(folder: Path) -> None:
    """Make the data folder; one of ours is closed to others."""
    is_ours = not folder.exists() or (folder / ID_FILE).exists()
    folder.mkdir(parents=True, exist_ok=True)
    if is_ours:
        _close(folder)


def close_to_others(folder: Path) -> None:
    """Close what lies in the data folder and was made before, with a wider mode."""
    for pattern in (*_OURS, "quarantine"):
        for path in folder.glob(pattern):
            _close(path)


def _close(path: Path) -> None:
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        try:
            path.chmod(mode & 0o700)
        except OSError as exc:
            log.warning("%s can be read by others, and stays so: %s", path, exc.strerror)


def secret(store: Store, data_dir: Path, name: str) -> bytes:
    """32 random bytes, made on the first call and the same ever after. Blocks.

    One that an older version kept in the database moves out of it.
    """
    file = data_dir / "secrets" / name
    with contextlib.suppress(FileNotFoundError):
        if len(known := file.read_bytes()) == SECRET_BYTES:
            return known
    value = store.accounts.stored_secret(name) or secrets.token_bytes(SECRET_BYTES)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    aside = file.with_suffix(".new")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(value)
        out.flush()
        os.fsync(out.fileno())
    aside.replace(file)
    # Last: a crash before this line leaves the row, and the next start finds the same secret.
    store.accounts.drop_secret(name)
    return value
