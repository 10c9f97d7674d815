"""How much accepted work each user has: a limit on what waits, and one on what workers hold.

Training requests and samples count alike, from the moment they are accepted until they end. A user
at the limit `queued` is refused; one at the limit `running`, or in a pause, waits here, in the
order of arrival, before standing in a worker's line. Fairness between users is the gates' business,
not this one's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tinkex.server.fairness.line import Slot, Ticket, TicketLine, take_from
from tinkex.server.fairness.pauses import Pauses, Record
from tinkex.server.guard.budgets import SpendingBudgets
from tinkex.server.guard.quotas import Quotas
from tinkex.server.process.problems import ApiError


class OpenWork:
    def __init__(
        self, quotas: Quotas, budgets: SpendingBudgets, record: Record | None = None
    ) -> None:
        """`record` writes an event of the audit log."""
        self._quotas, self.budgets = quotas, budgets
        self._open: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._lines: dict[str, TicketLine[Ticket]] = {}
        self.pauses = Pauses(record)

    def require(self, user_id: str) -> None:
        """Refuse more work of a user who has enough.

        Raises:
            ApiError: 429.
        """
        self._quotas.check(user_id, "queued", self._open[user_id])

    def require_no_pause(self, user_id: str) -> None:
        """Refuse work of a caller who would wait for it on an open connection.

        Raises:
            ApiError: 429.
        """
        if reason := self.pauses.reason(user_id):
            headers = self.pauses.retry_after(user_id)
            raise ApiError(429, f"Your work is {reason}.", headers=headers)

    @property
    def by_user(self) -> Mapping[str, int]:
        """The number of open requests of each user."""
        return self._open

    def begin(self, user_id: str) -> None:
        self._open[user_id] += 1

    def end(self, user_id: str) -> None:
        take_from(self._open, user_id)

    def slot(self, user_id: str) -> Slot:
        """`async with`: wait until the user may have one more at the workers."""
        return Slot(self, user_id)

    def release(self, user_id: str) -> None:
        take_from(self._held, user_id)
        self._grant(user_id)

    async def acquire(self, user_id: str, _cost: float = 1.0) -> None:
        if self.pauses.left_s(user_id):
            await self.pauses.over(user_id)
        if user_id not in self._lines and self._has_room(user_id):
            self._held[user_id] += 1
            return
        line = self._lines.get(user_id)
        if line is None:
            line = self._lines[user_id] = TicketLine(lambda ticket: self.release(ticket.user))
        try:
            await line.wait(Ticket(user_id, 1.0))
        finally:
            self._grant(user_id)

    def _has_room(self, user_id: str) -> bool:
        limit = self._quotas.limit(user_id, "running")
        return not limit or self._held[user_id] < limit

    def _grant(self, user_id: str) -> None:
        line = self._lines.get(user_id)
        if line is None:
            return
        while (ticket := line.first()) is not None and self._has_room(user_id):
            self._held[user_id] += 1
            line.serve(ticket)
        if not line:
            del self._lines[user_id]
