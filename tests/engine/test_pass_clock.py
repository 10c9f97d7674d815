"""A sample's share of the device's time."""

from __future__ import annotations

import pytest

from tinkex.engine.sample.pass_clock import PassClock


def test_a_pass_is_divided_among_those_in_it():
    now = [0.0]
    clock = PassClock(lambda: now[0])

    def run_pass(num_rows: int, seconds: float) -> float:
        """The clock as it reads at the end of the pass, before it is over."""
        clock.begin()
        clock.among(num_rows)
        now[0] += seconds
        read_s = clock.read_s()
        clock.end()
        return read_s

    assert run_pass(1, 2.0) == 2.0
    since_s = clock.read_s()
    now[0] += 100.0  # nobody samples
    assert run_pass(4, 2.0) == 2.5
    assert run_pass(2, 1.0) - since_s == pytest.approx(1.0)
