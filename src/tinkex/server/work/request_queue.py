"""The numbered requests of one model that have not ended, and how far the model has come.

Requests come in any order and leave in that of their numbers. A number that nothing runs for, such
as that of a refused request, has an entry too, so that nobody waits for it. After a crash the queue
goes back behind a snapshot: what changed the state since stands at its number again. Bodies beyond
a bound are kept in the journal alone. When a request runs is for the lane to say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tinkex.server.work import replay
from tinkex.server.work.queued_request import QueuedRequest

MAX_HELD_BYTES = 64_000_000
"""Bodies of one model kept in memory; those beyond wait in the journal."""


@dataclass(slots=True)
class SeqNumbers:
    """How far the requests of a model have come: `next - 1 <= applied <= newest`.

    Without a crash `next - 1` is `applied`. A replay sets `next` back, and catches up.
    """

    next: int = 0
    """The number whose turn it is."""
    applied: int = -1
    """The last number whose effect is in the state and published."""
    newest: int = -1
    """The highest number that has arrived."""

    def arrived(self, seq_id: int) -> None:
        self.newest = max(self.newest, seq_id)

    def passed(self, seq_id: int) -> None:
        """Go on to the number after `seq_id`."""
        self.next = seq_id + 1
        self.apply(seq_id)  # a replay passes numbers that were applied before

    def apply(self, seq_id: int) -> None:
        """Count the effect of a request that is not published yet, but will be."""
        self.applied = max(self.applied, seq_id)

    def go_back(self, snapshot_seq: int) -> None:
        """Go back to the number after a snapshot's."""
        assert snapshot_seq <= self.applied, f"a snapshot of {snapshot_seq}, ahead of {self}"
        self.next = snapshot_seq + 1


class Numbering:
    """Places in a model's order, where some requests stand between those that a client numbered.

    A client numbers its calls, but not those sent beside its SDK (`Operation.is_unnumbered`). Such
    a request takes the place behind all that have arrived, and every number after it moves by one.
    Numbers before it keep their place, so a repeat finds what it repeats.
    """

    def __init__(self, places: Iterable[int] = ()) -> None:
        """`places` of requests without a number, in order."""
        self._first_moved: list[int] = []
        self._places: set[int] = set()
        for place in places:
            self.insert(place)

    def insert(self, place: int) -> None:
        """Put a request without a number at a place, behind all others."""
        self._first_moved.append(place - len(self._first_moved))
        self._places.add(place)

    def take_back(self, place: int) -> None:
        """Undo the last `insert`."""
        self._first_moved.pop()
        self._places.remove(place)

    def __contains__(self, place: int) -> bool:
        return place in self._places

    def place(self, number: int) -> int:
        """The place of a client's number."""
        return number + bisect_right(self._first_moved, number)


class RequestQueue:
    def __init__(self) -> None:
        self.numbers = SeqNumbers()
        self._requests: dict[int, QueuedRequest] = {}
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def head(self) -> QueuedRequest | None:
        """The request whose turn it is; None when it has not arrived."""
        return self._requests.get(self.numbers.next)

    @property
    def oldest(self) -> QueuedRequest | None:
        return self._requests[min(self._requests)] if self._requests else None

    @property
    def has_gap(self) -> bool:
        """Whether all that is here waits for a number that has not arrived."""
        return bool(self._requests) and self.head is None

    @property
    def gap(self) -> range:
        """The numbers that have not arrived and that all others wait for; of any length."""
        return range(self.numbers.next, min(self._requests)) if self.has_gap else range(0)

    @property
    def num_unfinished(self) -> int:
        """How many requests somebody waits for the end of."""
        return sum(request.mode == "run" for request in self._requests.values())

    def find(self, seq_id: int) -> QueuedRequest | None:
        return self._requests.get(seq_id)

    def has_seen(self, seq_id: int) -> bool:
        """Whether a number waits or has ended, so that the journal knows what became of it."""
        return seq_id <= self.numbers.applied or seq_id in self._requests

    def num_ahead(self, request: QueuedRequest) -> int:
        return sum(1 for seq_id in self._requests if seq_id < request.seq_id)

    def in_order(self) -> list[QueuedRequest]:
        return [self._requests[seq_id] for seq_id in sorted(self._requests)]

    # ------------------------------------------------------------------------ arriving

    def put(self, request: QueuedRequest) -> None:
        """Take a request in at its number, without its body when too many are held."""
        self._requests[request.seq_id] = request
        self.numbers.arrived(request.seq_id)
        self._held_bytes += request.held_bytes
        # Never the one whose turn it is: it would be read back at once.
        is_first = request.seq_id <= self.numbers.next
        if request.held_bytes and self._held_bytes > MAX_HELD_BYTES and not is_first:
            self.release(request)
            request.spilled = True

    def skip(self, seq_id: int) -> None:
        """Take in the number of a request that was refused."""
        self.put(QueuedRequest(seq_id, mode="skip"))

    def load(self, snapshot_seq: int, ended: Iterable[int], requests: list[QueuedRequest]) -> None:
        """Take in what the journal holds after a snapshot, in a new queue."""
        # Ends may reach the journal out of order (a full disk): an accepted request may be behind
        # one that ended. It runs at its number when the state is restored, see `go_back`.
        applied = max([snapshot_seq, *ended])
        self.numbers = SeqNumbers(applied + 1, applied, applied)
        for request in requests:
            if request.mode == "run" or request.seq_id > applied:
                self.put(request)
        self.numbers.next = min([applied + 1, *self._requests])

    def go_back(self, snapshot_seq: int, replays: Mapping[int, QueuedRequest]) -> None:
        """Stand behind a snapshot again: `replays` run before what waits."""
        applied = self.numbers.applied
        waiting = {n: request for n, request in self._requests.items() if request.mode == "run"}
        ahead = {n: request for n, request in self._requests.items() if n > applied}
        # What waits goes on top: where the journal lost an end, a request that nobody was told of
        # stands among the replays, and its client is told this time.
        for seq_id, request in replays.items():
            if (known := self._requests.get(seq_id)) is not None:  # it was being replayed already
                request.suspicion = known.suspicion
        self._requests = {**ahead, **replays, **waiting}
        self._requests |= replay.skips_between(self._requests, after=snapshot_seq, through=applied)
        self.numbers.go_back(snapshot_seq)
        for request in replays.values():
            request.held_bytes = 0  # snapshots bound how many there are, not this queue

    # ------------------------------------------------------------------------ leaving

    def retire(self, request: QueuedRequest) -> None:
        """Go on to the number after a request's."""
        self._requests.pop(request.seq_id, None)
        self._held_bytes -= request.held_bytes
        request.held_bytes = 0
        self.numbers.passed(request.through_seq)

    def release(self, request: QueuedRequest) -> None:
        """Let go of what a request holds in memory."""
        self._held_bytes -= request.held_bytes
        request.let_go()
