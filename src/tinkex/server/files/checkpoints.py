"""Checkpoints as the server sees them: names, paths, folders, owners and lifetimes.

A checkpoint is a row in the store that names a complete folder under `data_dir/checkpoints`, or in
an object store of which that folder holds copies (`depot.py`).
Folders have names of their own that never repeat, so no client-given name becomes a file path, an
overwrite never touches a folder in use, and a crash leaves at worst a folder without a row, which
`Shelf.set_strays_aside` moves to the quarantine. Weights themselves are written by the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from tinkex.errors import EngineError, InvalidInputError
from tinkex.server.files.depot import Depot, is_stored
from tinkex.server.files.disk_quota import DiskQuota, OverQuotaError
from tinkex.server.files.encryption import is_encrypted
from tinkex.server.files.folders import DataFolder, folder_size
from tinkex.server.files.uploads import Uploads
from tinkex.server.process.problems import ApiError
from tinkex.store import Checkpoint, Store, UsageCount, User
from tinkex.types.account.checkpoints import TinkerPath, check_name
from tinkex.types.fields.bounds import MAX_TTL_S, MIN_TTL_S

log = logging.getLogger(__name__)
# `new_folder` names a folder by a run id, so an id has no slash and does not begin with a dot.
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")


def parse_path(path: str) -> TinkerPath:
    """Read `tinker://RUN_ID/KIND/NAME`.

    Raises:
        InvalidInputError: It is anything else, or has an id or a name that no server gives.
    """
    parsed = TinkerPath.parse(path)
    return checked_path(parsed.run_id, parsed.kind, parsed.name)


def checked_path(run_id: str, kind: str, name: str) -> TinkerPath:
    path = TinkerPath.parse(f"tinker://{run_id}/{kind}/{name}")
    if not _RUN.fullmatch(run_id):
        raise InvalidInputError(f"{run_id!r} is not a training run id.")
    check_name(name)
    return path


def expiry_of(ttl_s: int | None) -> float | None:
    """The moment a checkpoint with that time to live ends; None for one that stays."""
    if ttl_s is None:
        return None
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise InvalidInputError(
            f"ttl_seconds must be between {MIN_TTL_S} (one hour) and {MAX_TTL_S} (ten years), "
            f"got {ttl_s}; leave it out to keep the checkpoint.",
            path="ttl_seconds",
        )
    return time.time() + ttl_s


class Shelf:
    """All checkpoints of one server. Methods are coroutines; folder work runs off the loop."""

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        depot: Depot | None = None,
        disk_quota: DiskQuota | None = None,
    ) -> None:
        self._store = store
        self.disk_quota = disk_quota or DiskQuota(store.stored, lambda user_id: 0)
        self.folders = DataFolder(data_dir)
        self.depot = depot
        self.root = self.folders.root / "checkpoints"
        self.ephemeral_root = self.folders.root / "ephemeral"
        self.uploads = Uploads(self.folders.root / "uploads", store.stored)
        self._in_progress: set[str] = set()
        self._clearing: set[asyncio.Task[None]] = set()
        self.copying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By target: a repeat waits for the first one, and then finds its copy in the store."""

    async def at_hand(self, name: str) -> Path:
        """The folder of a row, to be read soon; fetched where it is only in the object store.

        Raises:
            EngineError: It cannot be fetched from the object store.
        """
        folder = self.folders.path(name)
        if self.depot is not None and is_stored(name):
            self._in_progress.add(str(folder))  # what is being fetched is no stray
            try:
                await self.depot.fetch(name)
            finally:
                self.end_writing(folder)
        return folder

    def new_folder(self, path: TinkerPath) -> Path:
        """A folder for the engine to write into; it does not exist yet, its parent does."""
        run = path.run_id.replace(":", "-")
        return self._new(self.root / run / path.kind / f"{path.name}-{secrets.token_hex(6)}")

    def new_ephemeral_folder(self, sampling_session_id: str) -> Path:
        """The folder of an unnamed sampler snapshot, which lives as long as its session."""
        name = sampling_session_id.replace(":", "-")
        return self._new(self.ephemeral_root / f"{name}-{secrets.token_hex(6)}")

    def _new(self, folder: Path) -> Path:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._in_progress.add(str(folder))  # it is no stray, though no row knows it yet
        return folder

    async def admit(
        self, path: TinkerPath, *, overwrite: bool, request_id: str | None = None
    ) -> Checkpoint | None:
        """Ask before saving. Gives the checkpoint when this very request has saved it before.

        Raises:
            InvalidInputError: The name is taken and `overwrite` is not set.
        """
        checkpoint = await self._store.call(self._store.checkpoints.get, str(path))
        if checkpoint is None:
            return None
        if request_id is not None and checkpoint.request_id == request_id:
            return checkpoint
        if not overwrite:
            raise InvalidInputError(
                f"{path} exists already. Save under another name, delete it first, or pass "
                "overwrite=True where the call has it.",
                path="path",
            )
        return None

    def reserve(self, folder: Path, user_id: str, num_bytes: int, *, freed: int = 0) -> Path:
        """Keep room for a new folder of about that size, whose row says how large it became.

        Raises:
            OverQuotaError: Its owner has no room for it; the folder is given up.
        """
        try:
            name = self.folders.name(folder)
            self.disk_quota.admit(name, user_id, max(num_bytes, 1), freed=freed)
        except OverQuotaError:
            self.remove_failed(folder)
            raise
        return folder

    async def register(self, checkpoint: Checkpoint) -> None:
        """List a checkpoint whose folder is complete; the folder it replaces goes.

        Raises:
            OverQuotaError: Its owner has no room for it; nothing is listed.
            EngineError: The object store did not take it; nothing is listed.
        """
        before = await self._store.call(self._store.checkpoints.get, checkpoint.path)
        freed = before.size_bytes if before and before.user_id == checkpoint.user_id else 0
        name, owner, size = checkpoint.folder, checkpoint.user_id, checkpoint.size_bytes
        with self.disk_quota.admitted(name, owner, size, freed=freed):
            if self.depot is not None:
                await self.depot.put(checkpoint.folder)
            replaced = await self._store.call(self._store.checkpoints.put, checkpoint)
        # Only now that a row knows the folder: before, `set_strays_aside` would have moved it.
        self.end_writing(self.folders.path(checkpoint.folder))
        self._store.usage.add([_saved(checkpoint)])
        action = "checkpoint_saved" if replaced is None else "checkpoint_overwritten"
        self.log(checkpoint.user_id, action, checkpoint.path, size_bytes=checkpoint.size_bytes)
        if replaced is not None:
            await self.remove_deleted()

    def measure(self) -> None:
        """Note the size of folders whose rows are from before sizes were kept. Blocks."""
        for folder in self._store.folders.unmeasured():
            with contextlib.suppress(EngineError):  # it lies outside the data folder
                self._store.folders.set_size(folder, folder_size(self.folders.path(folder)))

    def end_writing(self, folder: Path) -> None:
        """Nobody writes there any more; when no row points at it by now, it is a stray."""
        self._in_progress.discard(str(folder))
        self.disk_quota.release(self.folders.name(folder))

    def remove_failed(self, folder: Path) -> asyncio.Task[None]:
        """Remove what a failed save left, because a full disk may be the reason it failed."""
        self.end_writing(folder)
        task = asyncio.create_task(self._clear(folder))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
        return task

    @contextlib.asynccontextmanager
    async def making(self, target: TinkerPath) -> AsyncIterator[Path]:
        """A new folder for `target`. When the block fails, nothing of it is left."""
        folder = self.new_folder(target)
        try:
            yield folder
        except BaseException as failed:
            clearing = self.remove_failed(folder)
            if isinstance(failed, Exception):  # before anyone is told
                await asyncio.shield(clearing)
            raise

    async def _clear(self, folder: Path) -> None:
        name = self.folders.name(folder)
        try:
            if name in await self._store.call(self._store.folders.known):
                return  # it failed after it was listed
            await asyncio.to_thread(_remove_traces, folder)
            if self.depot is not None and is_stored(name):
                await self.depot.remove(name)
        except Exception:
            log.warning("%s is left of a save that failed", name, exc_info=True)

    async def readable(
        self, path: str, user: User, *, token_user: User | None = None
    ) -> Checkpoint:
        """A checkpoint that `user` (or the owner of an access token) owns, or that is public.

        Raises:
            ApiError: 404, the same for a foreign checkpoint as for an absent one.
        """
        checkpoint = await self._store.call(self._store.checkpoints.get, str(parse_path(path)))
        owners = {user.user_id, token_user.user_id if token_user else user.user_id}
        if checkpoint is None or not (checkpoint.public or checkpoint.user_id in owners):
            raise absent(path)
        return checkpoint

    async def check_plain(self, checkpoint: Checkpoint, *, path: str) -> None:
        """Refuse an export that only its recipients can read; `path` is the field in the message.

        Raises:
            InvalidInputError: It is encrypted.
        """
        if checkpoint.kind != "external_weights":
            return
        if await asyncio.to_thread(is_encrypted, await self.at_hand(checkpoint.folder)):
            raise InvalidInputError(
                f"{checkpoint.path} is encrypted for its recipients; use weights/ or "
                "sampler_weights/ of the same run, or export it without recipients.",
                path=path,
            )

    async def owned(self, path: TinkerPath, user: User) -> Checkpoint:
        """A checkpoint of `user`'s own; a foreign one, even public, is a 404."""
        checkpoint = await self._store.call(self._store.checkpoints.get, str(path))
        if checkpoint is None or checkpoint.user_id != user.user_id:
            raise absent(str(path))
        return checkpoint

    async def delete(self, checkpoint: Checkpoint, event: str = "checkpoint_deleted") -> None:
        """The row first, with a note of its folder: a crash in between leaves no broken listing."""
        gone = await self._store.call(self._store.checkpoints.delete, checkpoint.path)
        if gone is not None:
            self.log(gone.user_id, event, gone.path, size_bytes=gone.size_bytes)
            await self.remove_deleted()

    async def set_public(self, checkpoint: Checkpoint, public: bool) -> None:
        """Let everybody read it, or its owner alone again."""
        if checkpoint.public != public:
            await self._store.call(self._store.checkpoints.set_public, checkpoint.path, public)
            event = "checkpoint_published" if public else "checkpoint_unpublished"
            self.log(checkpoint.user_id, event, checkpoint.path)

    async def set_ttl(self, checkpoint: Checkpoint, ttl_s: int | None) -> None:
        """Keep it for so long from now on; None keeps it for good."""
        expires_at = expiry_of(ttl_s)
        await self._store.call(self._store.checkpoints.set_expiry, checkpoint.path, expires_at)
        self.log(checkpoint.user_id, "checkpoint_ttl_set", checkpoint.path, ttl_seconds=ttl_s)

    async def copy(
        self, source: Checkpoint, target: TinkerPath, user: User, **changes: object
    ) -> Checkpoint:
        """Duplicate a checkpoint's folder and list it under `target` for `user`."""
        async with self.making(target) as folder:
            self.disk_quota.admit(self.folders.name(folder), user.user_id, source.size_bytes)
            await asyncio.to_thread(_copy_folder, await self.at_hand(source.folder), folder)
            copied = replace(
                source,
                path=str(target),
                model_id=target.run_id,
                user_id=user.user_id,
                name=target.name,
                folder=self.folders.name(folder),
                public=False,
                created_at=time.time(),
                request_id=None,
                **changes,  # type: ignore[arg-type]
            )
            await self.register(copied)
        return copied

    async def expire(self, now: float | None = None) -> int:
        """Delete everything whose time has come; gives how many. The sweeper calls this."""
        ended = await self._store.call(self._store.checkpoints.expired, now)
        for checkpoint in ended:
            await self.delete(checkpoint, "checkpoint_expired")
        return len(ended)

    async def remove_deleted(self) -> None:
        """Remove the folders that the database says were deleted, those a crash left included."""
        for name in await self._store.call(self._store.folders.deleted):
            if self.depot is not None and is_stored(name) and not await self.depot.remove(name):
                continue
            if await asyncio.to_thread(self.folders.remove, name):
                await self._store.call(self._store.folders.removed, name)

    async def set_strays_aside(self) -> int:
        """Move folders that no row knows to the quarantine; gives how many.

        They are what crashes and failed saves left behind, or the checkpoints of a database that
        was replaced by another or an older one. Rows whose folder is missing are logged, and so is
        what no row knows in an object store: it stays where it is.
        """
        # In this order, a folder that is finished meanwhile is either still busy or already listed.
        folders = await asyncio.to_thread(self._found)
        busy = {Path(folder).name for folder in self._in_progress}
        known = await self._store.call(self._store.folders.known)
        noted = set(await self._store.call(self._store.folders.deleted))
        strays = [f for f in folders if self.folders.name(f) not in known | noted]
        # A save under way writes there, or aside under a name made of its own.
        strays = [f for f in strays if not any(name in f.name for name in busy)]
        for folder in strays:
            await asyncio.to_thread(self.folders.quarantine, folder)
        await asyncio.to_thread(self._warn_of_missing, known)
        if self.depot is not None:
            if unknown := self.depot.unknown(known | noted):
                text = "%d folders in %s are in no listing and stay there, the first is %s"
                log.warning(text, len(unknown), self.depot.url, unknown[0])
            await self.depot.move_in(known)
        return len(strays)

    def _found(self) -> list[Path]:
        folders = [*self.root.glob("*/*/*"), *self.ephemeral_root.glob("*")]
        return [folder for folder in folders if folder.is_dir()]

    def _warn_of_missing(self, known: set[str]) -> None:
        missing = sorted(name for name in known if not (self.folders.root / name).is_dir())
        if self.depot is not None:
            missing = [name for name in missing if not self.depot.has(name)]
        if missing:
            text = "%d listed folders are not in %s and cannot be loaded, the first is %s"
            log.warning(text, len(missing), self.folders.root, missing[0])

    def log(self, user_id: str, event: str, path: str, **details: object) -> None:
        self._store.audit.record(user_id, event, {"tinker_path": path, **details})


def absent(path: str) -> ApiError:
    text = f"No checkpoint {path!r} that you may use. List yours with GET /checkpoints."
    return ApiError(404, text, listing="checkpoints")


def _saved(checkpoint: Checkpoint) -> UsageCount:
    return UsageCount(
        kind="checkpoint",
        count=1,
        user_id=checkpoint.user_id,
        session_id=checkpoint.model_id.split(":")[0],
        model_id=checkpoint.model_id,
        base_model=checkpoint.base_model,
        project_id=checkpoint.project_id,
    )


def _copy_folder(source: Path, target: Path) -> None:
    aside = target.with_name(target.name + ".tmp")
    shutil.copytree(source, aside)
    aside.rename(target)


def _remove_traces(folder: Path) -> None:
    """Remove a folder, whatever was written aside for it, and its parents when nothing is left."""
    for path in [*folder.parent.glob("*"), *folder.parent.glob(".*")]:
        if folder.name in path.name:
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
        folder.parent.parent.rmdir()
