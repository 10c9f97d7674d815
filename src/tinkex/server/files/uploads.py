"""Uploads that are under way: a folder each, until their files become a checkpoint.

An upload names its files when it is started; no name that a client sends becomes a path. Each file
is taken once, written aside as it comes and renamed when it is whole. What an upload is for stands
in a file of its folder, so it survives a restart; what was half sent does not, and can be sent
again. An upload that nobody finishes is removed by the sweeper. Who may send what is decided by the
routes. The bytes of an upload are reserved for its user from before they come until its checkpoint
counts instead, so that nothing else takes their room.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tinkex.server.files.signing import LINK_TTL_S
from tinkex.server.process.problems import ApiError
from tinkex.store.stored_bytes import StoredBytes

log = logging.getLogger(__name__)
MAX_OPEN = 16
"""Uploads of one user that are not finished."""
MAX_SENDING = 4
"""Files of one user that are received at a time."""
PIECE_BYTES = 1024 * 1024
GRACE_S = 3600.0
"""How long an upload is kept after its links ended, for a file that was begun before."""
_ABOUT, _FILES = "upload.json", "files"


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    """A file that is whole."""

    size_bytes: int
    sha256: str


@dataclass(slots=True)
class Upload:
    """An upload: the adapter it is for, its files, and its checkpoint once it is finished."""

    upload_id: str
    user_id: str
    base_model: str
    lora: dict[str, Any]
    project_id: str | None
    names: tuple[str, ...]
    expires_at: float
    files: dict[str, ReceivedFile] = field(default_factory=dict)
    tinker_path: str | None = None
    """The checkpoint, once it is finished."""

    @property
    def missing(self) -> list[str]:
        return [name for name in self.names if name not in self.files]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


class Uploads:
    """All uploads of one server that are not over. File work runs off the event loop."""

    def __init__(self, root: Path, stored: StoredBytes) -> None:
        self._root = root
        self._stored = stored
        self._uploads: dict[str, Upload] = {}
        self._sending: set[tuple[str, str]] = set()
        self._finishing: dict[str, asyncio.Lock] = {}
        self._restore()

    def _restore(self) -> None:
        """Take up what an earlier process left. Blocks."""
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            try:
                about = json.loads((folder / _ABOUT).read_bytes())
                files = {n: ReceivedFile(**f) for n, f in about.pop("files").items()}
                upload = Upload(**about | {"names": tuple(about["names"]), "files": files})
            except (OSError, ValueError, TypeError, KeyError):
                log.warning("%s is what is left of an upload, and is removed", folder)
                shutil.rmtree(folder, ignore_errors=True)
                continue
            self._uploads[upload.upload_id] = upload
            self.reserve(upload)

    def reserve(self, upload: Upload) -> None:
        """Count the files of an upload as its user's, until `release`."""
        for name, file in upload.files.items() if upload.tinker_path is None else ():
            self._stored.reserve(reservation(upload, name), upload.user_id, file.size_bytes)

    def release(self, upload: Upload) -> None:
        """Count its files no more: a checkpoint counts instead, or they are gone."""
        for name in upload.names:
            self._stored.release(reservation(upload, name))

    async def start(
        self,
        user_id: str,
        names: tuple[str, ...],
        *,
        base_model: str,
        lora: dict[str, Any],
        project_id: str | None,
    ) -> Upload:
        """Begin an upload of files called `names`.

        Raises:
            ApiError: 429, the user has too many that are not finished.
        """
        mine = [u for u in self._uploads.values() if u.user_id == user_id and not u.tinker_path]
        if len(mine) >= MAX_OPEN:
            raise ApiError(
                429,
                f"You have {len(mine)} uploads that are not finished, the most there may be. "
                "Finish some, or wait until they end: an hour after they were started.",
                code="quota",
                headers={"Retry-After": "60"},
            )
        upload = Upload(
            upload_id=secrets.token_hex(16),
            user_id=user_id,
            base_model=base_model,
            lora=lora,
            project_id=project_id,
            names=names,
            expires_at=time.time() + LINK_TTL_S,
        )
        self._uploads[upload.upload_id] = upload  # counted before anybody else is let in
        try:
            await asyncio.to_thread(self._make, upload)
        except BaseException:
            del self._uploads[upload.upload_id]
            raise
        return upload

    def of_user(self, upload_id: str, user_id: str) -> Upload:
        """An upload of a user's own.

        Raises:
            ApiError: 404, the same for another user's as for none.
        """
        upload = self._uploads.get(upload_id)
        if upload is None or upload.user_id != user_id:
            raise ApiError(
                404,
                f"No upload {upload_id[:80]!r} of yours; one that is not finished ends after two "
                "hours. Start another with external_weights_upload_start.",
            )
        return upload

    # -- receiving

    async def receive(
        self,
        upload: Upload,
        name: str,
        pieces: AsyncIterator[bytes],
        *,
        declared_bytes: int,
        admit: Callable[[str, int], None],
    ) -> ReceivedFile:
        """Take a file as it comes. When it fails, nothing of it is left and it can be sent again.

        Args:
            admit: Reserves so many bytes in all under a name before they are taken; raises to
                refuse them.

        Raises:
            ApiError: 409, the file is there already, or is being sent.
        """
        self._check_is_free(upload, name)
        key = (upload.upload_id, name)
        self._sending.add(key)  # before anything is awaited: of two senders the second is refused
        reserved = reservation(upload, name)
        part = self._folder(upload) / f"{name}.part"
        try:
            file = await _write(
                part, pieces, declared_bytes, lambda num_bytes: admit(reserved, num_bytes)
            )
            await asyncio.to_thread(self._keep, upload, name, part, file)
            admit(reserved, file.size_bytes)  # no more than was admitted
        except BaseException:
            self._stored.release(reserved)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        finally:
            self._sending.discard(key)
        return file

    def _check_is_free(self, upload: Upload, name: str) -> None:
        if upload.tinker_path is not None:
            raise ApiError(409, f"This upload is finished: it is {upload.tinker_path}.")
        if (there := upload.files.get(name)) is not None:
            raise ApiError(
                409,
                f"{name} was uploaded already: {there.size_bytes} bytes, sha256 {there.sha256}. A "
                "link takes one file once; start another upload to send another.",
                code="already_uploaded",
            )
        if (upload.upload_id, name) in self._sending:
            raise ApiError(409, f"{name} is being sent by another request; wait for its end.")
        owners = Counter(self._uploads[upload_id].user_id for upload_id, _ in self._sending)
        if owners[upload.user_id] >= MAX_SENDING:
            raise ApiError(
                429,
                f"You send {MAX_SENDING} files already, the most at a time.",
                code="quota",
                headers={"Retry-After": "2"},
            )

    # -- finishing

    @contextlib.asynccontextmanager
    async def finishing(self, upload: Upload) -> AsyncIterator[Path]:
        """Alone with an upload; gives the folder of its files.

        Raises:
            ApiError: 404, another request found it wrong meanwhile, and it is gone.
        """
        lock = self._finishing.setdefault(upload.upload_id, asyncio.Lock())
        async with lock:
            self.of_user(upload.upload_id, upload.user_id)
            yield self._folder(upload) / _FILES

    async def finished(self, upload: Upload, tinker_path: str) -> None:
        """The files are a checkpoint; a repeat of the call is told which, until the upload ends."""
        upload.tinker_path = tinker_path
        self.release(upload)
        await asyncio.to_thread(self._note, upload)
        await asyncio.to_thread(shutil.rmtree, self._folder(upload) / _FILES, True)

    async def drop(self, upload: Upload) -> None:
        """Forget an upload and remove its files."""
        self._uploads.pop(upload.upload_id, None)
        self._finishing.pop(upload.upload_id, None)
        self.release(upload)
        await asyncio.to_thread(shutil.rmtree, self._folder(upload), True)

    async def drop_old(self, now: float | None = None) -> int:
        """Remove uploads whose time is over; gives how many. The sweeper calls this."""
        limit = (time.time() if now is None else now) - GRACE_S
        busy = {upload_id for upload_id, _ in self._sending}
        busy |= {name for name, lock in self._finishing.items() if lock.locked()}
        over = [u for u in self._uploads.values() if u.expires_at < limit]
        over = [upload for upload in over if upload.upload_id not in busy]
        for upload in over:
            await self.drop(upload)
        return len(over)

    # -- on disk

    def _folder(self, upload: Upload) -> Path:
        return self._root / upload.upload_id

    def _make(self, upload: Upload) -> None:
        (self._folder(upload) / _FILES).mkdir(parents=True)
        self._note(upload)

    def _keep(self, upload: Upload, name: str, part: Path, file: ReceivedFile) -> None:
        part.replace(self._folder(upload) / _FILES / name)
        upload.files[name] = file
        self._note(upload)

    def _note(self, upload: Upload) -> None:
        """Write down how an upload stands."""
        file = self._folder(upload) / _ABOUT
        aside = file.with_name(f"{_ABOUT}.{secrets.token_hex(4)}")
        with aside.open("w") as out:
            json.dump(asdict(upload), out)
            _sync(out)
        aside.replace(file)


def reservation(upload: Upload, name: str) -> str:
    """The name under which the bytes of a file are reserved."""
    return f"uploads/{upload.upload_id}/{name}"


async def _write(
    part: Path,
    pieces: AsyncIterator[bytes],
    declared_bytes: int,
    admit: Callable[[int], None],
) -> ReceivedFile:
    digest, size, held, admitted = hashlib.sha256(), 0, bytearray(), declared_bytes
    admit(admitted)
    with await asyncio.to_thread(part.open, "wb") as out:

        def write(piece: bytes) -> None:
            digest.update(piece)
            out.write(piece)

        async for piece in pieces:
            held += piece
            size += len(piece)
            if size > admitted:  # it did not say how long it is
                admitted = size + PIECE_BYTES
                admit(admitted)
            if len(held) >= PIECE_BYTES:
                await asyncio.to_thread(write, bytes(held))
                held.clear()
                admit(admitted)  # the disk may have been filled meanwhile
        await asyncio.to_thread(write, bytes(held))
        await asyncio.to_thread(_sync, out)
    return ReceivedFile(size, digest.hexdigest())


def _sync(out: IO[Any]) -> None:
    out.flush()
    os.fsync(out.fileno())
