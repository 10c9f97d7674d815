"""Which checkpoint a lost run starts from, and which calls are made again (R23): pure decisions."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tinkex.client.recovery.call_log import CallLog, RecordedCall
from tinkex.client.recovery.policy import RecoveryPolicy
from tinkex.errors import PromiseLostError

RUN = SimpleNamespace(model_id="run")


def make(log: CallLog, method: str, *args, answered: bool = True, is_ours: bool = False):
    """Add a call; one that is not answered lost its promise."""
    call = RecordedCall(method, args, {}, log.position, is_ours, (Future(), RUN))
    if method == "save_state":
        log.watch_save(call, call.made[0])
    if answered:
        call.made[0].set_result(SimpleNamespace(path=f"tinker://run/weights/{args[0]}"))
    else:
        call.made[0].set_exception(PromiseLostError("gone"))
    log.add(call)
    return call


def steps(log: CallLog, num: int, *, save: bool = True) -> None:
    """Each with a forward_backward at 3 n, an optim_step and, if asked for, a checkpoint."""
    for _ in range(num):
        make(log, "forward_backward", 0)
        make(log, "optim_step", 0)
        make(log, "save_state" if save else "forward", f"s{log.position}", is_ours=save)


def positions(things) -> list[int]:
    return [thing.position for thing in things]


def test_the_newest_checkpoint_comes_first_and_only_later_calls_are_repeated():
    log = CallLog(RecoveryPolicy())
    steps(log, 2)
    make(log, "forward_backward", 0)
    make(log, "forward", 0)
    log.take_saves()
    assert positions(log.candidates(log.saved[::-1])) == [5, 2]
    assert positions(log.to_repeat(log.saved[-1])) == [6]  # the forward has its answer


def test_calls_before_the_last_but_one_checkpoint_are_forgotten():
    log = CallLog(RecoveryPolicy(keep=2))
    steps(log, 4)
    assert positions(log.take_saves()) == [2, 5]
    assert positions(log.saved) == [8, 11]
    assert positions(log.calls) == [9, 10, 11]
    assert log.num_forgotten(log.saved[0]) == 0


@pytest.mark.parametrize("method", ["forward_backward", "forward", "save_weights_for_sampler"])
def test_a_call_that_waits_keeps_the_checkpoint_before_it(method):
    log = CallLog(RecoveryPolicy(keep=1))
    steps(log, 1)
    waiting = make(log, method, "x", answered=False)
    steps(log, 3)
    assert log.take_saves() == []
    best, *later = log.candidates(log.saved[::-1])
    assert best.position == 2
    assert positions(later) == [12, 9, 6]
    assert log.to_repeat(best)[0] is waiting
    # From a later one it could only be answered wrongly, so it is not made again.
    assert waiting not in log.to_repeat(later[0])
    waiting.answer._succeed(None)
    make(log, "save_state", "another", is_ours=True)
    assert positions(log.take_saves()) == [2, 6, 9]  # 12 is the second chance


def test_a_name_that_was_used_again_is_trusted_once_the_second_save_is_done():
    log = CallLog(RecoveryPolicy())
    make(log, "save_state", "last")
    make(log, "optim_step", 0)
    make(log, "save_state", "last")
    log.take_saves()
    assert positions(log.candidates(log.saved[::-1])) == [2]
    make(log, "save_state", "last", answered=False)
    assert log.candidates(log.saved[::-1]) == []
    assert "a name of its own" in log.distrusted(log.saved)[0]


def test_the_best_checkpoint_repeats_only_the_step_under_way():
    log = CallLog(RecoveryPolicy(checkpoint="best"))
    steps(log, 2, save=False)
    make(log, "forward_backward", 0)
    make(log, "save_state", "ours", answered=False, is_ours=True)
    (saved,) = log.locate([checkpoint("old", "3.0")])
    assert (saved.position, saved.metric) == (-1, 3.0)
    assert positions(log.to_repeat(saved)) == [5, 6]


def test_effects_that_nobody_can_repeat_are_counted():
    log = CallLog(RecoveryPolicy())
    steps(log, 4)
    log.take_saves()
    (old,) = log.locate([checkpoint("before-all", None)])
    assert log.num_forgotten(old) == 9  # positions 0 to 8


def checkpoint(name: str, score: str | None) -> SimpleNamespace:
    return SimpleNamespace(
        tinker_path=f"tinker://run/weights/{name}",
        checkpoint_type="training",
        time=0,
        user_metadata={"loss:sum": score} if score else None,
    )
