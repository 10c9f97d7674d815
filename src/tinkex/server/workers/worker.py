"""How the server reaches an engine, wherever it runs.

Behind a `Worker` stands a child process, an actor on another machine, or a pool of either: lanes,
samples and the catalog know this protocol and nothing more. A worker may lose all it holds at any
moment and rebuild itself; it restores nothing, because what its adapters were is in the journal.

A member of a pool is a `Worker`. What makes a member on another machine:

- It starts itself again when it dies or hangs, and counts that in `generation`. Jobs that it held
  fail with `WorkerLostError`; nothing is posted twice by itself.
- It is told jobs in an order and gives those of one adapter to its engine in that order. Jobs of
  several adapters, and samples, need no order between them.
- What a job names by path (a checkpoint's folder) lies on the disk of the
  server. A member elsewhere brings what a job reads before it hands the job to its engine, and
  brings back what the engine wrote before it says that the job is done. Folders and files never
  change under their name, so each travels once. `content_sha256` in a folder's `tinkex.json`
  says what was written; engines compute it from what they read, and refuse a folder that differs.
- It waits for no other member but in a process group (`gradient_groups`), which has a deadline
  and a thread of its own: the pool asks each member and waits with the patience of its watchdog, so
  that a member that hangs is ended and the others go on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from tinkex.engine.jobs import AdapterResult, DropAdapterJob, Event, Job, LoadAdapterJob, Result
from tinkex.errors import TinkerError

OnEvent = Callable[[Event], None]


class Worker(Protocol):
    @property
    def name(self) -> str:
        """For logs and messages."""

    @property
    def address(self) -> str:
        """Where other members reach its machine; empty: it is the server's."""

    @property
    def generation(self) -> int:
        """How often it was started, each time with an empty memory; see `lease`."""

    @property
    def refusal(self) -> str:
        """Why it cannot run with its settings at all; empty while it can."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes jobs."""

    @property
    def is_moving(self) -> bool:
        """Whether it did something lately, or has nothing to do."""

    @property
    def held_bytes(self) -> dict[str, int]:
        """Its memory by `heartbeat.KINDS`; empty while it starts."""

    @property
    def utilisation(self) -> float:
        """The share of the last minute that it was busy, between 0 and 1."""

    async def start(self) -> None:
        """Begin to start. Returns before it is ready."""

    async def wait_ready(self) -> None:
        """Wait until it takes jobs.

        Raises:
            EngineError: It did not start in time.
        """

    def post(self, job: Job, on_event: OnEvent | None = None) -> asyncio.Future[Result]:
        """Send a job. Jobs of one adapter run in the order of the calls.

        Returns at once. Cancelling the future cancels the job. `on_event` sees its `Progress` and
        `Tokens`. The future may raise:
            InvalidInputError: The caller can fix it; no state has changed.
            EngineError: The job failed; the state of its adapter is not to be trusted.
            WorkerLostError: The adapter is gone and must be restored.
        """

    def cancel(self, job_id: str) -> None:
        """End a job that waits or samples; one that trains runs to its end."""

    async def close(self) -> None: ...


async def run(worker: Worker, job: Job) -> Result:
    """Wait for a worker that is starting, and run one job that needs no adapter."""
    await worker.wait_ready()
    return await worker.post(job)


@asynccontextmanager
async def adapter_for_a_moment(
    worker: Worker, purpose: str, **fields: Any
) -> AsyncIterator[tuple[str, AdapterResult]]:
    """Load an adapter of no run for the length of a block; gives its id, and what was read.

    Args:
        fields: Those of a `LoadAdapterJob`: a base model, a folder, a mixture.
    """
    name = f"{purpose}-{secrets.token_hex(8)}"
    load = LoadAdapterJob(job_id=f"{name}-load", adapter_id=name, with_optimizer=False, **fields)
    try:
        loaded = await run(worker, load)
        assert isinstance(loaded, AdapterResult)
        yield name, loaded
    finally:
        with suppress(TinkerError):  # a worker that died has dropped it
            await run(worker, DropAdapterJob(job_id=f"{name}-drop", adapter_id=name))
