"""What one user may hold: bytes on disk, live sessions, models in use, requests a second.

Amounts are counted in the database and remembered for a few seconds, so a burst can pass a limit by
what it makes in that time, not more. A limit of 0 means none. Also here: how often an address may
try a key that does not exist.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinkex.server.config import ServerConfig
from tinkex.server.problems import ApiError
from tinkex.store import Store

LOOK_EVERY_S = 3.0
DAY_S = 86_400.0
MAX_REMEMBERED = 10_000
_DISK = "disk"
_BY_PATH = {
    "create_session": "sessions",
    "create_model": "models",
    **dict.fromkeys(("save_weights", "save_weights_for_sampler", "save_weights_external"), _DISK),
    "checkpoints/import": _DISK,
    "copy_weights": _DISK,
}
_WAY_OUT = {
    _DISK: "Delete checkpoints, or give them a time to live",
    "sessions": "Finish sessions, or use one for several runs",
    "models": "Unload models that are done",
}


@dataclass(slots=True)
class _Count:
    amount: float
    until: float


class Quotas:
    def __init__(
        self, store: Store, config: ServerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._clock = clock
        self._limits = {
            _DISK: config.max_user_disk_bytes,
            "sessions": config.max_user_sessions,
            "models": config.max_user_models,
        }
        self._rate = config.max_user_requests_per_s
        self._counts: OrderedDict[tuple[str, str], _Count] = OrderedDict()
        self._buckets: OrderedDict[str, _Count] = OrderedDict()

    def spend(self, user_id: str) -> None:
        """Count one request.

        Raises:
            ApiError: 429, for more than the user may make.
        """
        if not self._rate:
            return
        now, burst = self._clock(), 10 * self._rate
        bucket = self._buckets.get(user_id)
        if bucket is None:
            bucket = self._buckets[user_id] = _Count(burst, now)
            _trim(self._buckets)
        bucket.amount = min(burst, bucket.amount + (now - bucket.until) * self._rate)
        bucket.until = now
        if bucket.amount < 1:
            raise ApiError(
                429,
                f"More than {self._rate:g} requests a second with your keys; slow down.",
                headers={"Retry-After": "1"},
            )
        bucket.amount -= 1

    async def require(self, user_id: str, path: str) -> None:
        """Refuse to make more of what the user has enough of.

        Raises:
            ApiError: 429.
        """
        what = _BY_PATH.get(path.removeprefix("/api/v1/"))
        if what is None or not (limit := self._limits[what]):
            return
        found = self._counts.get((user_id, what))
        if found is None or found.until < self._clock():
            amount = await self._store.call(self._count, user_id, what)
            found = _Count(amount, self._clock() + LOOK_EVERY_S)
            self._counts[(user_id, what)] = found
            _trim(self._counts)
        if found.amount >= limit:
            shown = "bytes of checkpoints" if what == _DISK else what
            raise ApiError(
                429,
                f"You have {found.amount:.0f} {shown}, the limit is {limit}. {_WAY_OUT[what]}.",
                code="quota",
                headers={"Retry-After": "60"},
            )
        if what != _DISK:
            found.amount += 1

    def _count(self, user_id: str, what: str) -> float:
        if what == "sessions":
            return self._store.sessions.count_alive(user_id, time.time() - DAY_S)
        if what == "models":
            return self._store.models.count_loaded(user_id)
        totals = self._store.checkpoints.storage_by_project(user_id).values()
        return sum(size_bytes for _, size_bytes in totals)


class Strangers:
    """Addresses that try keys which do not exist; after so many a minute they are put off."""

    MAX_A_MINUTE = 120

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tries: OrderedDict[str, _Count] = OrderedDict()

    def failed(self, address: str) -> bool:
        """Note an attempt; True when there were too many."""
        now = self._clock()
        found = self._tries.get(address)
        if found is None or found.until < now:
            found = self._tries[address] = _Count(0, now + 60)
            _trim(self._tries)
        found.amount += 1
        return found.amount > self.MAX_A_MINUTE


def _trim(counts: OrderedDict[Any, _Count]) -> None:
    while len(counts) > MAX_REMEMBERED:
        counts.popitem(last=False)
