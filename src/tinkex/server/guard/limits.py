"""How large a body may be, by route and encoding, and how many bytes requests may hold in memory.

A route that carries training data or prompts takes much, everything else a little; JSON takes less
than protobuf, because it costs many times its size once parsed. `BodyBudget` is the sum over all
requests under way: whoever would exceed it waits for others to end, and no user can take it all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from tinkex.contract.cost import LARGE, MEDIUM, SMALL, UPLOAD
from tinkex.server.fairness.line import Ticket, TicketLine, take_from
from tinkex.server.guard.callers import is_foreign
from tinkex.server.process.problems import ApiError
from tinkex.wire.endpoints import ENDPOINTS

JSON_BYTES = 64 * 1024 * 1024
_LIMITS = {row.path: row.limit.sent_bytes for row in ENDPOINTS.values()}
_UPLOADS = tuple(row.path.partition("{")[0] for row in ENDPOINTS.values() if row.limit is UPLOAD)
WAIT_S = 30.0
MAX_WAITING = 256
"""Requests of one user that wait for room; each holds what its connection has read ahead."""


def body_limit(
    path: str,
    content_type: str,
    max_body_bytes: int,
    max_upload_bytes: int = UPLOAD.sent_bytes,
) -> int:
    """Most bytes a body of that route may have, before and after it is unpacked."""
    if path.startswith(_UPLOADS):
        return max_upload_bytes
    limit = _LIMITS.get(path)
    if limit is None:  # endpoints of other APIs carry conversations
        limit = (MEDIUM if is_foreign(path) else SMALL).sent_bytes
    if limit != LARGE.sent_bytes:
        return min(limit, max_body_bytes)
    is_proto = content_type.startswith("application/x-protobuf")
    return max_body_bytes if is_proto else min(JSON_BYTES, max_body_bytes)


def too_large(limit: int) -> HTTPException:
    """The refusal of a body above its limit. The rest of it is not read, so the connection ends.

    FastAPI, where it reads a form itself, takes any other class for a form that is broken: a 400.
    """
    text = f"The body exceeds the {limit} bytes that this route takes; send less per request."
    return HTTPException(413, text, headers={"Connection": "close"})


@dataclass(slots=True, eq=False)
class _Reservation(Ticket):
    own_bytes: int = 0


class BodyBudget:
    """Bytes of request bodies and answers held at a time, in all and by one user."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self.per_user_bytes = total_bytes // 2
        self._held = 0
        self._by_user: Counter[str] = Counter()
        self._excess: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()
        self._line: TicketLine[_Reservation] = TicketLine(
            lambda ticket: self.release(ticket.user, int(ticket.cost))
        )

    @property
    def held_bytes(self) -> int:
        return self._held

    async def reserve(self, user_id: str, num_bytes: int, *, own_bytes: int = 0) -> None:
        """Wait until there is room for so many bytes; give them back with `release`.

        One body alone always fits, so that a limit on bodies above the budget does not hang;
        `own_bytes` of it are held already.

        Raises:
            ApiError: 429, when there was none for long, or too many of the user's wait for it.
        """
        if self._takes(user_id, num_bytes, own_bytes):
            return
        if self._num_waiting[user_id] >= MAX_WAITING:
            raise self._full()
        self._num_waiting[user_id] += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._line.wait(_Reservation(user_id, num_bytes, own_bytes=own_bytes))
        except TimeoutError:
            raise self._full() from None
        finally:
            take_from(self._num_waiting, user_id)

    def _full(self) -> ApiError:
        return ApiError(
            429,
            f"The server holds {self._held} bytes of requests under way; try again in a "
            "moment, with fewer large requests at a time.",
            headers={"Retry-After": "1"},
        )

    def exceed(self, user_id: str, num_bytes: int) -> None:
        """Count bytes that are there already; give them back with `return_excess`.

        They are of a user's share and not of all the room: nobody else waits for them.
        """
        self._excess[user_id] += num_bytes

    def return_excess(self, user_id: str, num_bytes: int) -> None:
        take_from(self._excess, user_id, num_bytes)
        self._serve()

    def release(self, user_id: str, num_bytes: int) -> None:
        self._held -= num_bytes
        take_from(self._by_user, user_id, num_bytes)
        self._serve()

    def _serve(self) -> None:
        # Only those are woken who have room now: hundreds that look for it hold up the event loop.
        for ticket in self._line.waiting():
            if self._takes(ticket.user, int(ticket.cost), ticket.own_bytes):
                self._line.serve(ticket)

    def _takes(self, user_id: str, num_bytes: int, own_bytes: int) -> bool:
        """Whether there is room for so many bytes, which are held from now on."""
        mine = self._by_user[user_id] + self._excess[user_id]
        fits_user = mine == own_bytes or mine + num_bytes <= self.per_user_bytes
        if not fits_user or (self._held != own_bytes and self._held + num_bytes > self._total):
            return False
        self._held += num_bytes
        self._by_user[user_id] += num_bytes
        return True
