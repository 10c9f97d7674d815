"""Share a worker's slots fairly between users.

A worker holds a bounded number of requests. Those who want in wait here, one line per user, and a
free slot goes to the user who has had the least so far (start-time fair queueing over a cost, such
as tokens). A user with ten thousand requests waiting delays a newcomer by one request. The last
eighth of the slots is for users who hold few, so that a newcomer need not even wait for a long
request of another to end. The gate sees costs and users, never requests, models or HTTP.
"""

from __future__ import annotations

import heapq
from collections import Counter

from tinkex.server.fairness.line import Slot, Ticket, TicketLine, take_from

MAX_REMEMBERED = 10_000
"""With more users than this, those who neither wait nor are ahead of the others are forgotten."""


class FairGate:
    """`async with gate.slot(user, cost):` waits for a slot and gives it back."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = self._free = self._kept_free = self._few = 0
        self._held: Counter[str] = Counter()
        self._lines: dict[str, TicketLine[Ticket]] = {}  # of users of whom somebody waits
        self._used: dict[str, float] = {}  # virtual time: the cost that each user has had
        self._order: list[tuple[float, str]] = []  # a heap with one entry per user in `_ordered`
        self._ordered: set[str] = set()  # users in line, and those who left it without a slot
        self._now = 0.0  # the virtual time of the last user served
        self._forget_above = MAX_REMEMBERED
        self.resize(num_slots)

    def resize(self, num_slots: int) -> None:
        """Have so many slots; when they become fewer, those held stay held."""
        self._free += num_slots - self.num_slots
        self.num_slots = num_slots
        self._kept_free = num_slots // 8
        self._few = max(num_slots // 16, 1)
        self._grant()

    def slot(self, user: str, cost: float = 1.0) -> Slot:
        return Slot(self, user, cost)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    async def acquire(self, user: str, cost: float = 1.0) -> None:
        if self._may_take(user) and (not self._lines or self._free <= self._kept_free):
            self._take(user, cost)
            return
        line = self._lines.get(user)
        if line is None:
            line = self._lines[user] = TicketLine(lambda ticket: self.release(ticket.user))
            # A user at rest saves up nothing: it starts at the virtual time of those served now.
            self._used[user] = max(self._used.get(user, 0.0), self._now)
        self._put_in_order(user)
        try:
            await line.wait(Ticket(user, cost))
        finally:
            self._drop_empty(user)

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

    def _drop_empty(self, user: str) -> None:
        if not self._lines.get(user, True):
            del self._lines[user]

    def _put_in_order(self, user: str) -> None:
        if user not in self._ordered:
            self._ordered.add(user)
            heapq.heappush(self._order, (self._used[user], user))

    def _grant(self) -> None:
        full: list[str] = []  # users who hold many, while only kept slots are left
        while self._free > 0 and self._order:
            used, user = heapq.heappop(self._order)
            self._ordered.discard(user)
            line = self._lines.get(user)
            if line is None:
                continue
            if used < self._used[user]:  # left the line and came back
                self._put_in_order(user)
            elif not self._may_take(user):
                full.append(user)
            else:
                if (ticket := line.first()) is not None:
                    self._take(user, ticket.cost)
                    line.serve(ticket)
                self._drop_empty(user)
                if user in self._lines:
                    self._put_in_order(user)
        for user in full:
            self._put_in_order(user)

    def _charge(self, user: str, cost: float) -> None:
        start = max(self._used.get(user, 0.0), self._now)
        self._now = start
        self._used[user] = start + cost
        if len(self._used) > self._forget_above:
            # Users at rest start from `_now` anyway. Those in line are asked for theirs; one who
            # holds many slots waits while newcomers pass, so `_now` may be beyond it.
            self._used = {
                name: used
                for name, used in self._used.items()
                if used > self._now or name in self._lines
            }
            self._forget_above = max(MAX_REMEMBERED, 2 * len(self._used))
