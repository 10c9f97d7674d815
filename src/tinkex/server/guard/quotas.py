"""What one user may hold or do at a time, each limit declared once.

A limit comes from the server's settings (`max_user_<name>`), or from what an administrator set for
the user; 0 means none. All keys of a user share them, so that a second key doubles nothing; a key
may have a rate of its own beneath its user's. What is held (disk, sessions, models, work, results)
outlives its key, or is fetched with another, so it is counted for the user: to limit what one key
holds, give it a user of its own.
Sessions and models are counted in the database and made under a lock of their user (`one_more`), so
that a burst makes no more than there may be. Bytes on the disk are judged in `files.disk_quota`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from tinkex.contract.amounts import amount_of
from tinkex.errors import ConfigError
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.problems import ApiError
from tinkex.store import Store, User

DAY_S = 86_400.0
BURST_S = 10.0
"""Requests of so many seconds may come at once."""
MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit: its name, what it counts, and what a user does who has reached it."""

    name: str
    counts: str
    way_out: str
    retry_s: int = 60
    is_held: bool = False
    """The user has it until something of it is given back."""

    @property
    def setting(self) -> str:
        return f"max_user_{self.name}"

    def refusal(self, amount: float, limit: float) -> ApiError:
        headers = {"Retry-After": str(self.retry_s)}
        if self.is_held:
            headers["x-should-retry"] = "false"  # waiting does not make it less
        return ApiError(
            429,
            f"You have {amount:.0f} {self.counts}, the limit {self.name!r} is {limit:.0f}. "
            f"{self.way_out}, or ask an administrator of this server for more.",
            code="quota",
            headers=headers,
        )


_DECLARED = (
    Quota("disk_bytes", "bytes on the disk", "Delete what you do not need", is_held=True),
    Quota("sessions", "sessions", "Finish sessions, use one for several runs", is_held=True),
    Quota("models", "models", "Unload models that are done", is_held=True),
    Quota("queued", "requests that wait or run", "Wait until some of them are done", retry_s=2),
    Quota("running", "requests at the workers", "More of them wait by themselves"),
    Quota(
        "result_bytes",
        "bytes of results that wait to be fetched",
        "Fetch them before you ask for more samples",
        retry_s=5,
    ),
    Quota("requests_per_minute", "requests a minute", "Slow down", retry_s=1),
)
COUNTED = ("sessions", "models", "disk_bytes")
"""Those that are counted from what is stored."""
QUOTAS: dict[str, Quota] = {quota.name: quota for quota in _DECLARED}


def check_names(quotas: Mapping[str, Any]) -> None:
    """Refuse a limit that nobody enforces.

    Raises:
        ApiError: 400.
    """
    for name in quotas:
        if name not in QUOTAS:
            raise ApiError(
                400, f"There is no quota {name!r}; there are {', '.join(QUOTAS)}.", path="quotas"
            )


def read_quotas(entries: Iterable[str]) -> dict[str, float]:
    """Settings from `NAME=NUMBER`, where a number may end in k, M, G or T.

    Raises:
        ConfigError: Not of that form, or no quota.
    """
    settings: dict[str, float] = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        value = amount_of(text)
        if name not in QUOTAS or not 0 <= value < 2**62:
            raise ConfigError(
                f"--quota {entry} is not NAME=NUMBER; names are {', '.join(QUOTAS)}, and a number "
                "may end in k, M, G or T."
            )
        settings[QUOTAS[name].setting] = value
    return settings


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
        self._defaults: dict[str, float] = {
            quota.name: getattr(config, quota.setting) for quota in _DECLARED
        }
        self._own: OrderedDict[str, Mapping[str, float]] = OrderedDict()
        # A lock lives as long as somebody holds it or waits for it.
        self._making: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._buckets: OrderedDict[str | int | None, _Count] = OrderedDict()
        """By the name of a user or the number of a key."""

    def load(self) -> None:
        """Read the limits of all users that have their own: accepted work goes on before they come.

        Blocks.
        """
        for user in self._store.accounts.with_quotas(MAX_REMEMBERED):
            self.note(user)

    def note(self, user: User) -> None:
        """Take the limits of a user as they are now; every request comes by here."""
        if user.quotas:
            self._own[user.user_id] = user.quotas
            _trim(self._own)
        elif self._own:
            self._own.pop(user.user_id, None)

    def limit(self, user_id: str, name: str) -> float:
        """The limit that holds for a user; 0 means none."""
        own = self._own.get(user_id)
        return self._defaults[name] if own is None else own.get(name, self._defaults[name])

    def limits(self, user: User) -> dict[str, float]:
        """All that hold for a user."""
        return self._defaults | {n: v for n, v in user.quotas.items() if n in QUOTAS}

    def check(self, user_id: str, name: str, amount: float) -> None:
        """Refuse more of what the user has `amount` of.

        Raises:
            ApiError: 429, which names the limit and the way out.
        """
        limit = self.limit(user_id, name)
        if limit and amount >= limit:
            raise QUOTAS[name].refusal(amount, limit)

    def spend(self, user: User) -> None:
        """Count one request, of its user and of its key.

        Raises:
            ApiError: 429, for more than the user may make, or the key.
        """
        rates = (
            (user.user_id, self.limit(user.user_id, "requests_per_minute"), "your keys"),
            (user.key_id, user.key_requests_per_minute, f"your key {user.key_id}"),
        )
        limited = [(self._bucket(name, rate), rate, whose) for name, rate, whose in rates if rate]
        for bucket, rate, whose in limited:
            if bucket.amount < 1:
                wait_s = max(1, math.ceil((1 - bucket.amount) * 60 / rate))
                raise ApiError(
                    429,
                    f"More than {rate:g} requests a minute, the limit 'requests_per_minute' of "
                    f"{whose}; slow down.",
                    code="quota",
                    headers={"Retry-After": str(wait_s)},
                )
        # Only now: a request that the key's bucket refuses must not use up what its user has left.
        for bucket, _, _ in limited:
            bucket.amount -= 1

    def _bucket(self, name: str | int | None, per_minute: float) -> _Count:
        """The bucket with the requests that are left to make now."""
        rate = per_minute / 60
        now, burst = self._clock(), max(1.0, BURST_S * rate)
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Count(burst, now)
            _trim(self._buckets)
        bucket.amount = min(burst, bucket.amount + (now - bucket.until) * rate)
        bucket.until = now
        return bucket

    @asynccontextmanager
    async def one_more(self, user_id: str, name: str) -> AsyncIterator[None]:
        """A block in which one session or model of the user is made, unless they have enough.

        Raises:
            ApiError: 429.
        """
        if not self.limit(user_id, name):
            yield
            return
        # Counted and made in one turn: sixty at once would all see the count before the first.
        async with self._making.setdefault((user_id, name), asyncio.Lock()):
            amount = await self._store.call(self.count, user_id, name)
            self.check(user_id, name, amount)
            yield

    def forget(self, user_id: str) -> None:
        """Begin the count of requests anew, because what the user may do was changed."""
        self._buckets.pop(user_id, None)

    def count(self, user_id: str, name: str) -> int:
        """How much of something that is stored a user has. Blocks."""
        return self.counts([user_id], name).get(user_id, 0)

    def counts(self, user_ids: Sequence[str], name: str) -> dict[str, int]:
        """The same of several users, in one question; who has none is left out. Blocks."""
        if name == "sessions":
            return self._store.sessions.count_alive(user_ids, time.time() - DAY_S)
        if name == "models":
            return self._store.models.count_loaded(user_ids)
        return {user_id: self._store.stored.of(user_id).total() for user_id in user_ids}


def _trim(counts: OrderedDict[Any, Any]) -> None:
    while len(counts) > MAX_REMEMBERED:
        counts.popitem(last=False)
