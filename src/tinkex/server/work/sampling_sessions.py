"""Sampling sessions: which weights a caller samples from, and until when they may.

A session names a base model, a checkpoint, or unnamed weights that a run saved for it. Reading a
checkpoint of somebody else may be forbidden later, so that right is looked at again and again.
Unnamed weights are many: those of a run that were unused for longest are let go of.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tinkex.engine.jobs import ModelInfo
from tinkex.errors import InvalidInputError
from tinkex.server.fairness.line import take_from
from tinkex.server.files.checkpoints import Shelf, parse_path
from tinkex.server.process.problems import ApiError
from tinkex.server.runs.live_sessions import LiveSessions
from tinkex.server.work.origins import Origins
from tinkex.server.workers.catalog import Catalog, split_context
from tinkex.store import Checkpoint, SamplingSession, Store, User
from tinkex.types import SampleRequest

MAX_CACHED_SESSIONS = 10_000
ACCESS_S = 1.0
"""How long the right to read a checkpoint may be taken for granted."""


class SessionWeights(NamedTuple):
    """The weights of a sampling session, as an engine finds them."""

    base_model: str
    folder: str | None
    info: ModelInfo | None


class SamplingSessions:
    def __init__(
        self,
        store: Store,
        shelf: Shelf,
        catalog: Catalog,
        live_sessions: LiveSessions,
        *,
        max_unnamed: int,
    ) -> None:
        self._store = store
        self._shelf = shelf
        self._catalog = catalog
        self._live_sessions = live_sessions
        self._max_unnamed = max_unnamed
        self.origins = Origins(shelf)
        self._cached: OrderedDict[str, SamplingSession] = OrderedDict()
        self._used_at: OrderedDict[str, float] = OrderedDict()  # of unnamed weights
        self._checked_at: dict[str, float] = {}  # when a session's right to read was looked at
        self._num_samples: Counter[str] = Counter()  # of each folder, waiting or running
        self._inflight: OrderedDict[str, SamplingSession] = OrderedDict()  # the newest, by run

    # ------------------------------------------------------------------------ opening

    async def create(
        self, user: User, session_id: str, seq_id: int, base_model: str | None, path: str | None
    ) -> SamplingSession:
        """Open a sampling session; the same (session, seq_id) gives back the first."""
        named = (f"{session_id}:sample:{seq_id}", session_id, seq_id)
        session = await self._new(user, *named, base_model, path)
        if session is None:
            raise InvalidInputError("one of base_model and model_path is needed", path="base_model")
        self._catalog.resolve(session.base_model)
        return await self._store.call(self._store.sampling.create, session)

    async def unlisted(
        self, user: User, name: str, *, base_model: str | None = None, path: str | None = None
    ) -> SamplingSession:
        """A session of work inside the server, of weights that `user` may read now.

        Raises:
            ApiError: There is no such checkpoint, or none that the user may read.
        """
        session = await self._new(user, name, "", 0, base_model, path)
        assert session is not None
        return session

    async def of_request(self, user: User, request: SampleRequest) -> SamplingSession:
        """The session that a request names, or one for this request alone."""
        if request.sampling_session_id is not None:
            session = await self.get(user, request.sampling_session_id)
            await self._live_sessions.use(session.session_id)
            return session
        name = f"direct-{secrets.token_hex(8)}"
        unlisted = await self._new(user, name, "", 0, request.base_model, request.model_path)
        if unlisted is None:
            raise InvalidInputError(
                "one of sampling_session_id, model_path and base_model is needed",
                path="sampling_session_id",
            )
        return unlisted

    async def _new(
        self,
        user: User,
        name: str,
        session_id: str,
        seq_id: int,
        base_model: str | None,
        path: str | None,
    ) -> SamplingSession | None:
        """Of a checkpoint or of a base model, not stored yet; None when neither is named."""
        folder = None
        if path is not None:
            checkpoint = await self._readable(user, path, base_model)
            folder = checkpoint.folder
            # A name with a length of context says more than that of the checkpoint.
            if base_model is None or split_context(base_model)[1] is None:
                base_model = checkpoint.base_model
        if base_model is None:
            return None
        await self._catalog.check_context(base_model)
        return SamplingSession(
            sampling_session_id=name,
            session_id=session_id,
            user_id=user.user_id,
            seq_id=seq_id,
            base_model=base_model,
            model_path=path,
            folder=folder,
            ephemeral=False,
            created_at=time.time(),
        )

    async def _readable(self, user: User, path: str, base_model: str | None) -> Checkpoint:
        checkpoint, resolve = await self._shelf.readable(path, user), self._catalog.resolve
        await self._shelf.check_plain(checkpoint, path="model_path")
        if base_model is not None and resolve(base_model) != resolve(checkpoint.base_model):
            raise InvalidInputError(
                f"{path} was trained on {checkpoint.base_model!r}, not on {base_model!r}",
                path="base_model",
            )
        return checkpoint

    def forget_runs(self, run_ids: Sequence[str]) -> None:
        """Look at the stored sessions of runs again: their unnamed weights are gone."""
        for name in [n for n, one in self._cached.items() if one.model_id in run_ids]:
            del self._cached[name]
        for run_id in run_ids:
            self._inflight.pop(run_id, None)

    async def get(self, user: User, sampling_session_id: str) -> SamplingSession:
        """A session of the caller's own, whose weights they may still read.

        Raises:
            ApiError: 404 for a session of nobody or of somebody else, 410 when its weights are gone
                or no longer shared.
        """
        session = self._cached.get(sampling_session_id) or await self._stored(sampling_session_id)
        if session is None or session.user_id != user.user_id:
            raise ApiError(404, f"No sampling session {sampling_session_id!r} of yours.")
        if session.inflight:
            session = await self._newest(session)
        if session.ephemeral and session.folder is None:
            raise ApiError(
                410,
                f"The unnamed weights of {sampling_session_id!r} are gone: its session ended, or "
                f"{self._max_unnamed} others of its run were used since (fewer where the disk "
                "quota is full). To keep weights, save them under a name: "
                "save_weights_for_sampler(name).",
            )
        if session.ephemeral and not session.inflight:  # whose own weights nobody uses
            self._used_at[sampling_session_id] = time.time()
            if len(self._used_at) > MAX_CACHED_SESSIONS:
                self._used_at.popitem(last=False)
        await self._check_access(session)
        return session

    def follow(self, saved: SamplingSession) -> None:
        """Let the other inflight sessions of the run sample from the weights of `saved`."""
        if saved.inflight and saved.model_id is not None:
            self._inflight[saved.model_id] = saved
            if len(self._inflight) > MAX_CACHED_SESSIONS:
                self._inflight.popitem(last=False)

    async def _newest(self, session: SamplingSession) -> SamplingSession:
        """The session over the newest inflight weights of its run, which stay in use by that."""
        assert session.model_id is not None
        newest = self._inflight.get(session.model_id)
        if newest is None:
            newest = await self._store.call(self._store.sampling.newest_inflight, session.model_id)
            if newest is None:
                return session
            self.follow(newest)
        self._used_at[newest.sampling_session_id] = time.time()
        return replace(session, folder=newest.folder)

    async def _stored(self, sampling_session_id: str) -> SamplingSession | None:
        session = await self._store.call(self._store.sampling.get, sampling_session_id)
        if session is not None:
            self._cached[sampling_session_id] = session
            if len(self._cached) > MAX_CACHED_SESSIONS:
                self._cached.popitem(last=False)
        return session

    # ------------------------------------------------------------------------ weights

    async def weights(self, session: SamplingSession) -> SessionWeights:
        folder = session.folder
        return SessionWeights(
            base_model=self._catalog.resolve(session.base_model),
            folder=None if folder is None else str(self._shelf.folders.path(folder)),
            info=await self._catalog.info(session.base_model),
        )

    async def prepare(self, session: SamplingSession) -> None:
        """Look at the right to read once more and fetch the weights, right before a sample runs."""
        await self._check_access(session)
        if session.folder is not None:
            await self._shelf.at_hand(session.folder)

    async def _check_access(self, session: SamplingSession) -> None:
        """Sampling from somebody else's checkpoint ends when it is no longer shared or replaced.

        Raises:
            ApiError: 410.
        """
        if session.model_path is None:
            return
        name, now = session.sampling_session_id, time.monotonic()
        if now - self._checked_at.get(name, -ACCESS_S) < ACCESS_S:
            return
        checkpoint = await self._store.call(self._store.checkpoints.get, session.model_path)
        # The run says whose a deleted checkpoint was; its folder may be there for a while.
        owner = checkpoint.user_id if checkpoint else await self._run_owner(session)
        is_shared = checkpoint is not None and checkpoint.public
        is_same = checkpoint is not None and checkpoint.folder == session.folder
        if session.user_id != owner and not (is_shared and is_same):
            raise ApiError(
                410, f"{session.model_path} is no longer shared with you, or was replaced."
            )
        if len(self._checked_at) >= MAX_CACHED_SESSIONS:
            self._checked_at.clear()
        self._checked_at[name] = now

    async def _run_owner(self, session: SamplingSession) -> str | None:
        run_id = parse_path(session.model_path or "").run_id
        run = await self._store.call(self._store.models.get, run_id)
        return run.user_id if run else None

    # ------------------------------------------------------------------------ unnamed weights

    def begin_sample(self, session: SamplingSession) -> None:
        """A sample waits or runs: the session's weights stay until `end_sample`."""
        if session.folder is not None:
            self._num_samples[session.folder] += 1

    def end_sample(self, session: SamplingSession) -> None:
        if session.folder is not None:
            take_from(self._num_samples, session.folder)

    async def last_unnamed_bytes(self, run_id: str) -> int:
        """The size of the newest unnamed weights of a run; 0 when it has none."""
        sessions = await self._store.call(self._store.sampling.unnamed_of, run_id)
        return sessions[-1].size_bytes if sessions else 0

    async def drop_superseded(self, run_id: str, keep: int | None = None) -> None:
        """Let the unnamed weights of a run go that were not used for longest, beyond its share.

        A loop that samples from each step's weights would otherwise fill the disk; the weights it
        goes on using, such as those it began with, stay. `keep`: fewer, for a user without room.
        """
        most = self._max_unnamed if keep is None else keep
        sessions = await self._store.call(self._store.sampling.unnamed_of, run_id)
        num_many = len(sessions) - most
        if not most or num_many <= 0:
            return
        needed = {s.sampling_session_id for s in sessions if s.folder in self._num_samples}
        needed.add(sessions[-1].sampling_session_id)  # the last was just made
        # Older ones must not take the place of the newest for those who follow the run.
        needed.update([s.sampling_session_id for s in sessions if s.inflight][-1:])
        names = {session.sampling_session_id: session.created_at for session in sessions}
        order = sorted(names, key=lambda name: max(names[name], self._used_at.get(name, 0.0)))
        for name in [name for name in order if name not in needed][:num_many]:
            await self._store.call(self._store.sampling.forget_folder, name)
            self._cached.pop(name, None)
            self._used_at.pop(name, None)
