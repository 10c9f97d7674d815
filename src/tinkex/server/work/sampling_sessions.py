"""Sampling sessions: which weights a caller samples from, and until when they may.

A session names a base model, a checkpoint, or unnamed weights that a run saved for it. Reading a
checkpoint of somebody else may be forbidden later, so that right is looked at again and again.
Unnamed weights are many: those of a run that were unused for longest are let go of.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from typing import NamedTuple

from tinkex.engine.jobs import ModelInfo
from tinkex.errors import InvalidInputError
from tinkex.server.fairness.line import take_from
from tinkex.server.files.checkpoints import Shelf, parse_path
from tinkex.server.process.problems import ApiError
from tinkex.server.runs.live_sessions import LiveSessions
from tinkex.server.work.origins import Origins
from tinkex.server.workers.catalog import Catalog
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
        self._num_samples: Counter[str] = Counter()  # of each session, waiting or running

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
            base_model, folder = checkpoint.base_model, checkpoint.folder
        if base_model is None:
            return None
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
        if parse_path(path).kind == "external_weights":
            raise InvalidInputError(
                f"{path} is an export; sample from weights/ or sampler_weights/", path="model_path"
            )
        checkpoint, resolve = await self._shelf.readable(path, user), self._catalog.resolve
        if base_model is not None and resolve(base_model) != resolve(checkpoint.base_model):
            raise InvalidInputError(
                f"{path} was trained on {checkpoint.base_model!r}, not on {base_model!r}",
                path="base_model",
            )
        return checkpoint

    async def get(self, user: User, sampling_session_id: str) -> SamplingSession:
        """A session of the caller's own, whose weights they may still read.

        Raises:
            ApiError: 404 for a session of nobody or of somebody else, 410 when its weights are gone
                or no longer shared.
        """
        session = self._cached.get(sampling_session_id) or await self._stored(sampling_session_id)
        if session is None or session.user_id != user.user_id:
            raise ApiError(404, f"No sampling session {sampling_session_id!r} of yours.")
        if session.ephemeral and session.folder is None:
            raise ApiError(
                410,
                f"The unnamed weights of {sampling_session_id!r} are gone: its session ended, or "
                f"{self._max_unnamed} others of its run were used since. To keep weights, save "
                "them under a name: save_weights_for_sampler(name).",
            )
        if session.ephemeral:
            self._used_at[sampling_session_id] = time.time()
            if len(self._used_at) > MAX_CACHED_SESSIONS:
                self._used_at.popitem(last=False)
        await self._check_access(session)
        return session

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
        self._num_samples[session.sampling_session_id] += 1

    def end_sample(self, session: SamplingSession) -> None:
        take_from(self._num_samples, session.sampling_session_id)

    async def drop_superseded(self, run_id: str) -> None:
        """Let the unnamed weights of a run go that were not used for longest, beyond its share.

        A loop that samples from each step's weights would otherwise fill the disk; the weights it
        goes on using, such as those it began with, stay.
        """
        sessions = await self._store.call(self._store.sampling.unnamed_of, run_id)
        num_many = len(sessions) - self._max_unnamed
        if not self._max_unnamed or num_many <= 0:
            return
        needed = {*self._num_samples, sessions[-1].sampling_session_id}  # the last was just made
        names = {session.sampling_session_id: session.created_at for session in sessions}
        order = sorted(names, key=lambda name: max(names[name], self._used_at.get(name, 0.0)))
        for name in [name for name in order if name not in needed][:num_many]:
            await self._store.call(self._store.sampling.forget_folder, name)
            self._cached.pop(name, None)
            self._used_at.pop(name, None)
