"""Share a worker's places fairly between users.

A worker holds a bounded number of requests. Those who want in wait here, one line per user, and a
free place goes to the user who has had the least so far (start-time fair queueing over a cost,
such as tokens). A user with ten thousand requests waiting delays a newcomer by one request. The
last eighth of the places is for users who hold few, so that a newcomer need not even wait for a
long request of another to end. The queue sees costs and users, never requests, models or HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol, TypeVar

K = TypeVar("K")


def take_from(counter: Counter[K], key: K, amount: int = 1) -> None:
    """Count less of one; at nothing it is forgotten, so that a counter has who is here, no more."""
    counter[key] -= amount
    if counter[key] <= 0:
        del counter[key]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's wait for a place."""

    user: str
    cost: float
    granted: asyncio.Future[None]


class Gate(Protocol):
    async def acquire(self, user: str, cost: float) -> None: ...
    def release(self, user: str) -> None: ...


@dataclass(slots=True, eq=False)
class Held:
    """`async with`: a place at a gate. A class, because a generator costs three times as much."""

    gate: Gate
    user: str
    cost: float = 1.0

    async def __aenter__(self) -> None:
        await self.gate.acquire(self.user, self.cost)

    async def __aexit__(self, *exc: object) -> None:
        self.gate.release(self.user)


class FairGate:
    """`async with gate.place(user, cost):` waits for a place and gives it back."""

    def __init__(self, places: int) -> None:
        self.num_places = self._free = self._kept_free = self._few = 0
        self._held: Counter[str] = Counter()
        self._lines: dict[str, deque[Ticket]] = {}
        self._used: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []  # a heap with one entry per user in `_ordered`
        self._ordered: set[str] = set()  # those in line, and those who left it without a place
        self._now = 0.0  # the virtual time of the last user served
        self.num_waiting = 0
        self.resize(places)

    def resize(self, places: int) -> None:
        """Have so many places; when they become fewer, those held stay held."""
        self._free += places - self.num_places
        self.num_places = places
        self._kept_free = places // 8
        self._few = max(places // 16, 1)
        self._grant()

    def place(self, user: str, cost: float = 1.0) -> Held:
        return Held(self, user, cost)

    async def acquire(self, user: str, cost: float = 1.0) -> None:
        if self._may_take(user) and (not self.num_waiting or self._free <= self._kept_free):
            self._take(user, cost)
            return
        ticket = self._join(user, cost)
        try:
            await ticket.granted
        except asyncio.CancelledError:
            if ticket.granted.done() and not ticket.granted.cancelled():
                self.release(user)  # granted and cancelled at once: the place goes to the next
            else:
                self._leave(ticket)
            raise

    def release(self, user: str) -> None:
        self._free += 1
        take_from(self._held, user)
        self._grant()

    def _may_take(self, user: str) -> bool:
        return self._free > (0 if self._held[user] < self._few else self._kept_free)

    def _take(self, user: str, cost: float) -> None:
        self._free -= 1
        self._held[user] += 1
        self._charge(user, cost)

    def ahead_of(self, user: str) -> int:
        """About how many requests are served before the last one of `user` in line."""
        mine = len(self._lines.get(user, ()))
        others = sum(min(len(line), mine) for name, line in self._lines.items() if name != user)
        return max(0, mine - 1) + others

    def _join(self, user: str, cost: float) -> Ticket:
        ticket = Ticket(user, cost, asyncio.get_running_loop().create_future())
        line = self._lines.setdefault(user, deque())
        if not line:
            self._used[user] = max(self._used.get(user, 0.0), self._now)
            self._put_in_order(user)
        line.append(ticket)
        self.num_waiting += 1
        return ticket

    def _put_in_order(self, user: str) -> None:
        if user not in self._ordered:
            self._ordered.add(user)
            heapq.heappush(self._order, (self._used[user], user))

    def _leave(self, ticket: Ticket) -> None:
        line = self._lines.get(ticket.user)
        if line is not None and ticket in line:
            line.remove(ticket)
            self.num_waiting -= 1
            if not line:
                del self._lines[ticket.user]

    def _grant(self) -> None:
        full: list[tuple[float, str]] = []  # users who hold many, while only kept places are left
        while self._free > 0 and self._order:
            used, user = heapq.heappop(self._order)
            self._ordered.discard(user)
            line = self._lines.get(user)
            if not line:
                continue
            if used < self._used[user]:  # left the line and came back
                self._put_in_order(user)
                continue
            if not self._may_take(user):
                full.append((used, user))
                continue
            ticket = line.popleft()
            self.num_waiting -= 1
            if ticket.granted.done():
                self._charge(user, ticket.cost)
            else:
                self._take(user, ticket.cost)
                ticket.granted.set_result(None)
            if line:
                self._put_in_order(user)
            else:
                del self._lines[user]
        for _, user in full:
            self._put_in_order(user)

    def _charge(self, user: str, cost: float) -> None:
        start = max(self._used.get(user, 0.0), self._now)
        self._now = start
        self._used[user] = start + cost
        if len(self._used) > 10_000:  # users at rest start from `_now` anyway
            self._used = {name: used for name, used in self._used.items() if used > self._now}
