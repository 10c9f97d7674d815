"""What a lane runs again when its state came back from a snapshot, and how often that may fail.

A snapshot is older than what was published. The requests between them that changed the state run
again, for that effect only; they are not told anybody a second time. Pure planning over rows of the
journal: the lane drives it, `model_state` brings the snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tinkex.server.work.operation import Operation
from tinkex.server.work.queued_request import QueuedRequest
from tinkex.store import JournalRow

MAX_LOSSES = 5
"""A replay that was lost this many times at the same request will not succeed."""


def replays_of(
    rows: Iterable[JournalRow], operations: Mapping[str, Operation[Any]], *, through: int
) -> dict[int, QueuedRequest]:
    """The requests that changed the state, up to the number `through`, by number."""
    replays = {}
    for row in rows:
        # A refused request changed nothing, and the state was restored after one that failed.
        if row.seq_id > through or row.state != "done":
            continue
        if (operation := operations[row.kind]).changes_state:
            assert row.body is not None, f"{row.request_id} has no body and no snapshot covers it"
            replays[row.seq_id] = QueuedRequest(
                row.seq_id, operation, row.request_id, row.body, mode="replay"
            )
    return replays


def skips_between(taken: Iterable[int], *, after: int, through: int) -> dict[int, QueuedRequest]:
    """Entries for the numbers that nothing is run for: refused, failed, or never came.

    One entry for each stretch of them, so that a hole costs memory by what stands around it, not by
    how many numbers it has.
    """
    # Every number up to `through` has an entry then, and the lane never waits for one of them.
    skips, first = {}, after + 1
    for seq_id in [*sorted(n for n in taken if n <= through), through + 1]:
        if first < seq_id:
            skips[first] = QueuedRequest(first, mode="skip", through_seq=seq_id - 1)
        first = seq_id + 1
    return skips


class LostReplays:
    """Counts the losses of replays, each of which starts afresh.

    By number: what kills a worker does so at the same number again, and a worker that is killed for
    other reasons is not lost for ever, however often that happens.
    """

    def __init__(self) -> None:
        self._by_number: Counter[int] = Counter()

    def is_hopeless(self, request: QueuedRequest) -> bool:
        """Count the loss of a request, if it was a replay; True when it was the last one."""
        if request.mode != "replay":
            return False
        # Whoever was to blame: a request that is not at fault gets past this number another time,
        # and then `forget` clears the count.
        self._by_number[request.seq_id] += 1
        return self._by_number[request.seq_id] >= MAX_LOSSES

    def forget(self) -> None:
        """Something new has ended: the state is behind what was replayed."""
        self._by_number.clear()
