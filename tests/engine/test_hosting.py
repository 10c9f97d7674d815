"""How a process with an engine takes jobs."""

import pytest

from tinkex.engine.hosting import Cancel, take
from tinkex.engine.jobs import DropAdapterJob, Failed


class Recorder:
    """An engine that notes what it is told, and submits nothing that is called broken."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def submit(self, job, emit) -> None:
        if job.adapter_id == "broken":
            raise RuntimeError("no such thing")
        self.told.append(job)

    def cancel(self, job_id: str) -> None:
        self.told.append(job_id)


def job(adapter_id: str) -> DropAdapterJob:
    return DropAdapterJob(job_id="1", adapter_id=adapter_id)


def test_jobs_are_submitted_where_they_were_moved_and_cancels_are_told():
    engine, ends = Recorder(), []
    take(engine, job("a"), ends.append)
    take(engine, job("a"), ends.append, lambda _: job("moved"))
    take(engine, Cancel("1"), ends.append)
    assert engine.told == [job("a"), job("moved"), "1"]
    assert ends == []


@pytest.mark.parametrize("move", [lambda job: job, lambda job: {}["no such thing"]])
def test_a_job_that_cannot_be_submitted_has_one_end(move, caplog):
    engine, ends = Recorder(), []
    take(engine, job("broken"), ends.append, move)
    (end,) = ends
    assert isinstance(end, Failed)
    assert (end.job_id, end.category) == ("1", "server")
    assert "no such thing" in end.message
    assert "submit failed" in caplog.text
