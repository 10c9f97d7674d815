"""A clock that jumps neither ends what is young nor hides what is done."""

from __future__ import annotations

from tinkex.server.process.steady_clock import SteadyClock
from tinkex.server.work.finished_logs import FinishedLog

DAY_S = 86_400.0


class Machine:
    """A wall clock and the seconds that really pass."""

    def __init__(self) -> None:
        self.wall_s, self.passed_s = 1_700_000_000.0, 50.0

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.passed_s += seconds


def test_a_jump_of_the_clock_does_not_age_anything() -> None:
    machine = Machine()
    clock = SteadyClock(lambda: machine.wall_s, lambda: machine.passed_s)
    start = clock.now()
    for jump in (30 * DAY_S, -60 * DAY_S):
        machine.wall_s += jump
        machine.wait(10)
    assert clock.now() == start + 20


def test_a_clock_that_is_corrected_a_little_is_followed() -> None:
    machine = Machine()
    clock = SteadyClock(lambda: machine.wall_s, lambda: machine.passed_s)
    for _ in range(100):
        machine.wait(60)
        machine.wall_s += 1
        clock.now()
    assert clock.now() == machine.wall_s


def test_a_cursor_from_the_future_hides_no_finished_sample() -> None:
    """Kept by a client from before a restart at which the clock went back."""
    log = FinishedLog(start=1000)
    log.add("a", 1)
    log.add("b", 1)
    found = log.after(5000)
    assert [entry.request_id for entry in found] == ["a", "b"]
    log.add("c", 1)
    assert [entry.request_id for entry in log.after(found[-1].cursor)] == ["c"]
