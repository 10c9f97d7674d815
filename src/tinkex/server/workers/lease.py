"""A lease: one life of a worker, and the jobs that are meant for what it holds in memory.

A worker that dies starts again and counts that (`Worker.generation`), with nothing of what it held.
A lease is valid until then. It is the only place that compares generations.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from tinkex.engine.jobs import Job, Result
from tinkex.errors import WorkerLostError
from tinkex.server.workers.worker import OnEvent, Worker

Answer = asyncio.Future[Result]


@dataclass(frozen=True, slots=True)
class Lease:
    worker: Worker
    generation: int

    @staticmethod
    def of(worker: Worker) -> Lease:
        """The lease of the life that a worker has now."""
        return Lease(worker, worker.generation)

    @property
    def is_valid(self) -> bool:
        return self.worker.is_ready and self.worker.generation == self.generation

    def post(self, job: Job, on_event: OnEvent | None = None) -> Answer:
        """Send a job to this life of the worker and no later one, which would not know it."""
        if not self.is_valid:
            return lost(f"{self.worker.name} is not the one that was meant")
        return self.worker.post(job, on_event)


def new_id() -> str:
    """An id for a job of the pool's own."""
    return f"pool-{secrets.token_hex(8)}"


# ------------------------------------------------------------------------------------ futures


def lost(text: str) -> Answer:
    """An answer that says that the adapter is gone."""
    answer: Answer = asyncio.get_running_loop().create_future()
    answer.set_exception(WorkerLostError(text))
    return answer


def ignore(answer: Answer) -> None:
    """Take note of an end that nobody waits for, so that asyncio logs no warning."""
    if not answer.cancelled():
        answer.exception()


def fail(answer: Answer, error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
        ignore(answer)


def chain(source: Answer, target: Answer) -> None:
    """Let one future end as another does; cancelling it cancels that one."""

    def ended(_: Answer) -> None:
        if target.done():
            ignore(source)
        elif source.cancelled():
            target.cancel()
        elif (error := source.exception()) is not None:
            fail(target, error)
        else:
            target.set_result(source.result())

    source.add_done_callback(ended)
    target.add_done_callback(lambda done: source.cancel() if done.cancelled() else None)
