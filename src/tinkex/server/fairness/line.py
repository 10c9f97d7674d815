"""A line of callers who wait, in the order in which they came, each until it is served or gives up.

Whom it serves, and when, its owner says: a `FairGate` has one line per user and serves the user who
had least; `OpenWork` has one per user and a limit for each; `BodyBudget` has one for all and serves
whoever fits. Here is what they have in common: a caller that is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

K = TypeVar("K")
T = TypeVar("T", bound="Ticket")


@dataclass(slots=True, eq=False)
class Ticket:
    """The wait of one caller."""

    user: str
    cost: float
    served: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class TicketLine(Generic[T]):
    """Tickets of those who wait; `serve` lets one of them go on."""

    def __init__(self, give_back: Callable[[T], None]) -> None:
        """`give_back` takes back what a caller was served with who gave up at that moment."""
        self._give_back = give_back
        # Whoever gives up may stand anywhere among thousands: a deque would be searched for them.
        self._tickets: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def waiting(self) -> list[T]:
        """The tickets in line, the oldest first."""
        # A cancelled caller's ticket stays until the event loop has told the caller.
        return [ticket for ticket in self._tickets if not ticket.served.done()]

    def first(self) -> T | None:
        """The ticket that has waited longest."""
        while self._tickets:
            ticket = next(iter(self._tickets))
            if not ticket.served.done():
                return ticket
            del self._tickets[ticket]  # cancelled: nobody may stand behind it
        return None

    async def wait(self, ticket: T) -> None:
        """Stand in line until `serve` is called with the ticket."""
        self._tickets[ticket] = None
        try:
            await ticket.served
        except asyncio.CancelledError:
            if ticket.served.done() and not ticket.served.cancelled():
                self._give_back(ticket)  # served and cancelled at once: the next one has it
            raise
        finally:
            self._tickets.pop(ticket, None)

    def serve(self, ticket: T) -> None:
        del self._tickets[ticket]
        ticket.served.set_result(None)


class Slots(Protocol):
    """A number of slots that callers wait for."""

    async def acquire(self, user: str, cost: float) -> None: ...
    def release(self, user: str) -> None: ...


@dataclass(slots=True, eq=False)
class Slot:
    """`async with`: one of the slots. A class, because a generator costs three times as much."""

    slots: Slots
    user: str
    cost: float = 1.0

    async def __aenter__(self) -> None:
        await self.slots.acquire(self.user, self.cost)

    async def __aexit__(self, *exc: object) -> None:
        self.slots.release(self.user)


def take_from(counter: Counter[K], key: K, amount: int = 1) -> None:
    """Count less of a key, and forget it at nothing: a counter has those who are here, no more."""
    counter[key] -= amount
    if counter[key] <= 0:
        del counter[key]
