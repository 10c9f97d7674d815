"""Who is alive: sessions, their owners and their heartbeats.

Heartbeats are the most frequent call and must never wait: owners and times are kept in memory, the
store hears of them about once a second. A session that falls silent is reported once, so that its
models can be parked; it comes back by itself with its next call.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from tinkex.server.process.problems import ApiError
from tinkex.store import Session, Store, User
from tinkex.types import CreateSessionRequest

MAX_CACHED = 100_000


class LiveSessions:
    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: OrderedDict[str, Session] = OrderedDict()
        self._seen: dict[str, float] = {}

    async def create(self, user: User, request: CreateSessionRequest) -> Session:
        now = time.time()
        session = Session(
            session_id=str(uuid.uuid4()),
            user_id=user.user_id,
            created_at=now,
            last_heartbeat=now,
            tags=request.tags,
            user_metadata=request.user_metadata or {},
            display_name=request.display_name,
            project_id=request.project_id,
            sdk_version=request.sdk_version,
            status={"type": "active"},
        )
        await self._store.call(self._store.sessions.create, session)
        self._remember(session)
        return session

    async def owned(self, user: User, session_id: str) -> Session:
        """A session of the caller's own; a foreign one is a 404 like an absent one."""
        session = await self._find(session_id)
        if session is None or session.user_id != user.user_id:
            raise ApiError(404, f"No session {session_id!r} of yours; create one first.")
        _refuse_ended(session)
        return session

    async def use(self, session_id: str) -> None:
        """Note that something of a session is used.

        Raises:
            ApiError: 410 when its user or an administrator ended the session.
        """
        session = await self._find(session_id) if session_id else None
        if session is not None:
            _refuse_ended(session)
        self.touch(session_id)

    async def heartbeat(self, user: User, session_id: str) -> None:
        """Note a sign of life.

        Raises:
            ApiError: 410 when the session was finished; the client stops beating then.
        """
        session = await self.owned(user, session_id)
        if session.status.get("type") != "active":
            raise ApiError(410, f"Session {session_id!r} is finished.")
        self.touch(session_id)

    def touch(self, session_id: str) -> None:
        if session_id:
            self._seen[session_id] = self._clock()
            self._store.sessions.heartbeat(session_id)

    def forget(self, session_id: str) -> None:
        """Read it from the store again: its status or project changed."""
        self._known.pop(session_id, None)

    def fell_silent(self, silence_s: float) -> list[str]:
        """Sessions without a sign of life for that long, each reported once per silence."""
        # By the monotonic clock: one that is set forward must park nobody.
        limit = self._clock() - silence_s
        silent = [session_id for session_id, seen in self._seen.items() if seen < limit]
        for session_id in silent:
            del self._seen[session_id]
        return silent

    async def _find(self, session_id: str) -> Session | None:
        session = self._known.get(session_id)
        if session is None:
            session = await self._store.call(self._store.sessions.get, session_id)
            if session is not None:
                self._remember(session)
        return session

    def _remember(self, session: Session) -> None:
        # Without what a client said about itself, which may be long.
        self._known[session.session_id] = replace(session, tags=[], user_metadata={})
        self._seen.setdefault(session.session_id, self._clock())
        while len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)


def _refuse_ended(session: Session) -> None:
    if session.status.get("type") == "cancelled":
        detail = session.status.get("detail") or "No reason was given."
        raise ApiError(
            410,
            f"Session {session.session_id!r} was ended. {detail} Its runs and checkpoints are "
            "kept; load them in a new session.",
            code="session_ended",
        )
