"""The numbers of a model's requests: what has its turn, what was applied, what has arrived."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.work.queued_request import QueuedRequest
from tinkex.server.work.request_queue import RequestQueue


def replays(*numbers: int) -> dict[int, QueuedRequest]:
    return {n: QueuedRequest(n, body=b"again", mode="replay") for n in numbers}


def drain(queue: RequestQueue) -> list[tuple[int, str]]:
    passed = []
    while (request := queue.head) is not None:
        passed.append((request.seq_id, request.mode))
        queue.retire(request)
    return passed


@given(arrivals=st.permutations(range(6)), snapshots=st.lists(st.integers(-1, 5), max_size=3))
def test_requests_leave_in_order_whatever_arrives_first_and_however_often_it_goes_back(
    arrivals: list[int], snapshots: list[int]
) -> None:
    queue, published = RequestQueue(), []
    for seq_id in arrivals:
        queue.put(QueuedRequest(seq_id, body=b"body"))
        published += [number for number, mode in drain(queue) if mode == "run"]
        numbers = queue.numbers
        for snapshot in snapshots:
            if snapshot <= numbers.applied:
                queue.go_back(snapshot, replays(*range(snapshot + 1, numbers.applied + 1)))
                assert numbers.next - 1 <= numbers.applied <= numbers.newest
                again = drain(queue)
                assert again == [(n, "replay") for n in range(snapshot + 1, numbers.applied + 1)]
        assert numbers.next - 1 == numbers.applied <= numbers.newest
    assert published == list(range(6))
    assert (len(queue), queue._held_bytes) == (0, 0)


def test_a_request_whose_end_the_journal_lost_runs_among_the_replays() -> None:
    queue = RequestQueue()
    queue.load(-1, ended=[0, 2], requests=[QueuedRequest(1)])
    assert (queue.numbers.next, queue.numbers.applied, queue.numbers.newest) == (1, 2, 2)
    queue.go_back(-1, replays(0, 2))
    assert drain(queue) == [(0, "replay"), (1, "run"), (2, "replay")]


def test_a_refused_number_stands_for_itself_until_the_state_has_passed_it() -> None:
    queue = RequestQueue()
    refused = [QueuedRequest(n, mode="skip") for n in (1, 4)]
    queue.load(2, ended=[3], requests=refused)
    assert drain(queue) == [(4, "skip")]
    assert queue.has_seen(1)


def test_a_gap_is_what_all_others_wait_for() -> None:
    queue = RequestQueue()
    assert not queue.has_gap
    queue.put(QueuedRequest(3))
    queue.skip(5)
    assert (queue.has_gap, list(queue.gap)) == (True, [0, 1, 2])
    queue.put(QueuedRequest(0))
    assert (queue.has_gap, list(queue.gap)) == (False, [])


def test_bodies_of_a_replay_are_not_counted_among_those_that_wait() -> None:
    queue = RequestQueue()
    queue.load(-1, ended=[0], requests=[])
    queue.go_back(-1, replays(0))
    drain(queue)
    assert queue._held_bytes == 0


def test_a_request_on_trial_stays_so_when_it_is_replayed_again() -> None:
    queue = RequestQueue()
    queue.load(-1, ended=[0, 1], requests=[])
    queue.go_back(-1, first := replays(0, 1))
    first[1].suspicion.on_trial = True
    queue.go_back(-1, again := replays(0, 1))
    assert [again[n].suspicion.on_trial for n in (0, 1)] == [False, True]
