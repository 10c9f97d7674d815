"""How a process with an engine takes jobs."""

from tinkex.engine.hosting import submitting
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


def test_a_job_that_cannot_be_submitted_has_one_end(caplog):
    engine, ends = Recorder(), []
    with submitting(job("broken"), ends.append):
        engine.submit(job("broken"), ends.append)
    (end,) = ends
    assert isinstance(end, Failed)
    assert (end.job_id, end.category) == ("1", "server")
    assert "no such thing" in end.message
    assert "submit failed" in caplog.text


def test_a_job_that_is_submitted_is_the_engines_to_end():
    engine, ends = Recorder(), []
    with submitting(job("a"), ends.append):
        engine.submit(job("a"), ends.append)
    assert engine.told == [job("a")]
    assert ends == []
