"""What has to happen now and then: expiry, clean-up, and the hourly bytes of storage.

One task per server. A round that fails is logged and the next one comes anyway; nothing else waits
for it. Rounds read and delete; they never touch what a running request uses, and remove from disk
only what the database says was deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tinkex.server.files.checkpoints import Shelf
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.steady_clock import SteadyClock
from tinkex.store import Store, UsageCount

log = logging.getLogger(__name__)
ROUND_S = 60.0
EPHEMERAL_GRACE_S = 3600.0
"""How long unnamed sampler weights and traced losses outlive a session that was finished."""
EPHEMERAL_SILENT_S = 14 * 24 * 3600.0
"""How long it outlives the last sign of life of a session that nobody finished."""
TRAJECTORY_TTL_S = 7 * 24 * 3600.0
"""How long a recorded conversation is kept."""


class Sweeper:
    def __init__(self, store: Store, shelf: Shelf, config: ServerConfig) -> None:
        self._store = store
        self._shelf = shelf
        self._config = config
        self._clock = SteadyClock()
        self._last_count: float | None = None

    async def run(self) -> None:
        """Sweep until cancelled. Strays are set aside once, before anything is saved."""
        await self._guarded(self._shelf.set_strays_aside)
        while True:
            await self._guarded(self.sweep)
            await asyncio.sleep(ROUND_S)

    async def sweep(self, now: float | None = None) -> None:
        """Make one round."""
        now = self._clock.now() if now is None else now
        await self._shelf.expire(now)
        await self._store.call(self._store.journal.sweep, now)
        await self._store.call(self._store.checkpoints.forget_keys, now - 86_400)
        await self._store.call(self._store.audit.forget, now - self._config.audit_ttl_s)
        await self._store.call(self._store.sessions.forget, now - self._config.session_ttl_s)
        await self._store.call(self._store.trajectories.forget_before, now - TRAJECTORY_TTL_S)
        await self._store.call(self._count_storage, now)
        await self._drop_ephemeral(now)
        await self._shelf.remove_deleted()
        await self._shelf.uploads.drop_old(now)
        if self._shelf.depot is not None:
            await self._shelf.depot.trim()
        purge = self._shelf.folders.purge_quarantine
        await asyncio.to_thread(purge, now - self._config.quarantine_ttl_s)

    def _count_storage(self, now: float) -> None:
        """Add the byte-hours since the last round; the first round only starts the clock."""
        last, self._last_count = self._last_count, now
        if last is None or now <= last:
            return
        hours = (now - last) / 3600
        self._store.usage.add(
            UsageCount(
                kind="storage",
                count=size_bytes * hours,
                user_id=user_id,
                project_id=project_id,
                at=now,
            )
            for user_id, project_id, size_bytes in self._store.checkpoints.storage_by_user()
        )

    async def _drop_ephemeral(self, now: float) -> None:
        moments = (now - EPHEMERAL_GRACE_S, now - EPHEMERAL_SILENT_S)
        await self._store.call(self._store.sampling.forget_losses, *moments)
        ended = await self._store.call(self._store.sampling.ephemeral_of_ended, *moments)
        for sampler in ended:
            await self._store.call(self._store.sampling.forget_folder, sampler.sampling_session_id)

    async def _guarded(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception:
            log.exception("a sweep failed; the next one is in %.0f s", ROUND_S)
