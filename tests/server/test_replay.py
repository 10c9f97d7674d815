"""What a lane runs again after its state came back from a snapshot."""

from types import SimpleNamespace

import pytest

from tinkex.server.work.queued_request import QueuedRequest
from tinkex.server.work.replay import MAX_LOSSES, LostReplays, replays_of, skips_between

OPERATIONS = {
    "step": SimpleNamespace(changes_state=True, is_barrier=False),
    "look": SimpleNamespace(changes_state=False, is_barrier=False),
}


def row(seq_id: int, kind: str = "step", state: str = "done", body: bytes | None = b"x"):
    return SimpleNamespace(
        seq_id=seq_id, kind=kind, state=state, body=body, request_id=f"r{seq_id}"
    )


def test_what_changed_the_state_and_was_published_runs_again():
    rows = [row(3), row(4, "look"), row(5, state="failed"), row(6), row(7)]
    found = replays_of(rows, OPERATIONS, through=6)
    assert list(found) == [3, 6]
    assert {request.mode for request in found.values()} == {"replay"}


def test_a_body_that_is_gone_is_never_passed_over():
    with pytest.raises(AssertionError, match="r3 has no body"):
        replays_of([row(3, body=None)], OPERATIONS, through=3)


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([], [(3, 9)]),
        ([3, 4, 9], [(5, 8)]),
        ([5], [(3, 4), (6, 9)]),
        (range(3, 10), []),
        ([12], [(3, 9)]),
    ],
)
def test_a_hole_of_any_length_is_one_entry(taken, expected):
    skips = skips_between(taken, after=2, through=9)
    assert [(at, skip.through_seq) for at, skip in skips.items()] == expected
    assert all(skip.mode == "skip" for skip in skips.values())


def test_nothing_stands_after_the_last_that_was_published():
    assert skips_between([], after=9, through=9) == {}


def test_a_replay_is_given_up_when_it_is_lost_again_at_the_same_place():
    lost = LostReplays()
    third, fourth = (QueuedRequest(n, mode="replay") for n in (3, 4))
    for _ in range(MAX_LOSSES - 1):
        assert not lost.is_hopeless(third)
        assert not lost.is_hopeless(fourth)
        assert not lost.is_hopeless(QueuedRequest(5))
    assert lost.is_hopeless(third)
    lost.forget()
    assert not lost.is_hopeless(third)
