"""How the server reaches an engine, wherever it runs.

Behind a `Worker` may stand a child process, a pool of them, or actors on other machines: lanes,
samples and the catalog know this protocol and nothing more. A worker may lose all it holds at any
moment and rebuild itself; it restores nothing, because what its adapters were is in the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tinkex.engine.jobs import Event, Job, Result

OnEvent = Callable[[Event], None]


class Worker(Protocol):
    @property
    def name(self) -> str:
        """For logs and messages."""

    @property
    def generation(self) -> int:
        """Counts how often the memory was lost, so that the owner of an adapter can tell.

        Of several processes that share an adapter's work, the loss of one is the loss of all.
        """

    @property
    def is_ready(self) -> bool:
        """It takes jobs."""

    @property
    def is_moving(self) -> bool:
        """It did something lately, or has nothing to do."""

    async def start(self) -> None:
        """Begin to start. Returns before it is ready."""

    async def wait_ready(self) -> None:
        """Wait until it takes jobs.

        Raises:
            EngineError: It did not start in time.
        """

    def post(
        self, job: Job, on_event: OnEvent | None = None, *, generation: int | None = None
    ) -> asyncio.Future[Result]:
        """Send a job. Jobs of one adapter run in the order of the calls.

        Returns at once. Cancelling the future cancels the job. `on_event` sees its `Progress` and
        `Tokens`. The future may raise:
            InvalidInputError: The caller can fix it; no state has changed.
            EngineError: The job failed; the state of its adapter is not to be trusted.
            WorkerLostError: All adapters are gone and must be restored.

        Args:
            generation: The one the job is meant for; another one would not know its adapter.
        """

    def cancel(self, job_id: str) -> None:
        """End a job that waits or samples; one that trains runs to its end."""

    async def close(self) -> None: ...


async def run(worker: Worker, job: Job) -> Result:
    """Wait for a worker that is starting, and run one job that needs no adapter."""
    await worker.wait_ready()
    return await worker.post(job)
