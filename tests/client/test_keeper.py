"""The keeper does one thing after another, and is there only while it is needed."""

from __future__ import annotations

import threading

import pytest
from recovery_world import wait_until

from tinkex.client.recovery import keeper
from tinkex.client.recovery.keeper import Keeper


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(keeper, "SLICE_S", 0.01)
    monkeypatch.setattr(keeper, "_LINGER_S", 0.05)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "the-keeper"]


def test_it_does_one_thing_after_another_on_one_thread():
    done, kept, all_given = [], Keeper("the-keeper", lambda: False), threading.Event()
    kept.submit(all_given.wait)
    for number in range(20):
        kept.submit(lambda n=number: done.append((n, threading.get_ident(), kept.is_current)))
    all_given.set()
    wait_until(lambda: len(done) == 20)
    assert [number for number, _, _ in done] == list(range(20))
    assert {(thread, there) for _, thread, there in done} == {(done[0][1], True)}
    assert not kept.is_current


def test_it_looks_while_there_is_something_to_look_after_and_then_ends():
    looks, needed = [], threading.Event()
    needed.set()

    def look() -> bool:
        looks.append(1)
        return needed.is_set()

    kept = Keeper("the-keeper", look)
    wait_until(lambda: threads() == [])  # of the test before
    kept.stay()
    wait_until(lambda: len(looks) > 20)  # longer than it lingers
    assert threads() == ["the-keeper"]
    needed.clear()
    wait_until(lambda: threads() == [])
    kept.submit(looks.clear)  # and begins again
    wait_until(lambda: len(looks) < 5)
    wait_until(lambda: threads() == [])


def test_a_failure_does_not_end_it(caplog):
    done, kept = [], Keeper("the-keeper", lambda: False)
    kept.submit(lambda: 1 / 0)
    kept.submit(done.append, 1)
    wait_until(lambda: done == [1])
    assert "going on" in caplog.text
