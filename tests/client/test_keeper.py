"""The keeper does one job after another, and is there until it is no longer needed."""

from __future__ import annotations

import threading

import pytest
from recovery_world import wait_until

from tinkex.client.recovery import keeper
from tinkex.client.recovery.keeper import Keeper


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(keeper, "SLICE_S", 0.01)


@pytest.fixture
def over():
    """The keeper of a test ends with it."""
    over = threading.Event()
    yield over
    over.set()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "the-keeper"]


def test_it_does_one_job_after_another_on_one_thread(over):
    done, all_given = [], threading.Event()
    kept = Keeper("the-keeper", lambda: 0.01, over.is_set)
    kept.submit(all_given.wait)
    for number in range(20):
        kept.submit(lambda n=number: done.append((n, threading.get_ident(), kept.is_current)))
    all_given.set()
    wait_until(lambda: len(done) == 20)
    assert [number for number, _, _ in done] == list(range(20))
    assert {(thread, there) for _, thread, there in done} == {(done[0][1], True)}
    assert not kept.is_current


def test_it_looks_when_it_said_and_when_it_is_woken_and_then_ends(over):
    looks = []
    wait_until(lambda: threads() == [])  # of the test before

    def look() -> float | None:
        looks.append(1)
        return 0.01 if len(looks) < 20 else None

    kept = Keeper("the-keeper", look, over.is_set)
    wait_until(lambda: len(looks) == 20)
    assert threads() == ["the-keeper"]
    kept.wake()
    wait_until(lambda: len(looks) == 21)
    over.set()
    kept.wake()
    wait_until(lambda: threads() == [])
    assert len(looks) <= 22


def test_a_failure_does_not_end_it(over, caplog):
    done, kept = [], Keeper("the-keeper", lambda: None, over.is_set)
    kept.submit(lambda: 1 / 0)
    kept.submit(done.append, 1)
    wait_until(lambda: done == [1])
    assert "going on" in caplog.text
    over.set()
    kept.wake()
