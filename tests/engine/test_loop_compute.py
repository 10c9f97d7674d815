"""The calls that a loop makes of its compute beside jobs: begin and rest."""

from __future__ import annotations

import threading

import pytest

from tinkex.engine import jobs
from tinkex.engine.loop.loop import Loop
from tinkex.engine.toy.compute import ToyCompute
from tinkex.engine.toy.config import ToyConfig


class _Restful(ToyCompute):
    """Gets a job in the middle of its first rest."""

    def __init__(self) -> None:
        super().__init__(ToyConfig())
        self.loop: Loop | None = None
        self.num_rests = 0
        self.rested_twice = threading.Event()

    def rest(self) -> None:
        self.num_rests += 1
        if self.num_rests == 2:
            self.rested_twice.set()
        elif self.loop is not None:
            self.loop.submit(jobs.LoadModelJob(job_id="late", base_model="m"), lambda event: None)


def test_a_job_that_comes_while_the_compute_is_told_to_rest_is_followed_by_another_rest() -> None:
    compute = _Restful()
    loop = Loop(compute, name="restful", idle_s=0.05)
    compute.loop = loop
    loop.submit(jobs.LoadModelJob(job_id="early", base_model="m"), lambda event: None)
    assert compute.rested_twice.wait(20)
    loop.close()


class _Broken(ToyCompute):
    def begin(self) -> None:
        raise RuntimeError("no memory on the card")


def test_a_compute_that_cannot_begin_fails_the_engine_at_once() -> None:
    with pytest.raises(RuntimeError, match="no memory on the card"):
        Loop(_Broken(ToyConfig()), name="broken")
