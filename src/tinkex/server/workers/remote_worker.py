"""Reach an engine on another machine: an actor on one node of a Ray cluster, on one device there or
on those of a group.

What a job reads is brought to the node before the job, once for each engine; what it writes is
brought back before anybody hears that it is done. Jobs of one adapter keep their order through
that, and nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import Any

from tinkex.cluster import job_paths
from tinkex.cluster.connection import Cluster, Node
from tinkex.cluster.engine_host import Forget, WrittenOnNode
from tinkex.cluster.remote_engine import RemoteEngine
from tinkex.engine.heartbeat import Activity
from tinkex.engine.hosting import Cancel, Ready, Refused
from tinkex.engine.jobs import Event, Failed, Job, Result
from tinkex.engine.registry.engines import make_engine
from tinkex.errors import EngineError
from tinkex.server.workers.child import WorkerSpec
from tinkex.server.workers.supervised_worker import SupervisedWorker
from tinkex.server.workers.watchdog import Budget

MAX_BROUGHT = 256
"""Folders kept on a node; those that were not used for longest go first."""


class RemoteWorker(SupervisedWorker):
    """An engine on a node; see `Worker`."""

    def __init__(
        self,
        cluster: Cluster,
        node: Node,
        spec: WorkerSpec,
        *,
        name: str,
        num_devices: int,
        uses_gpus: bool,
        start_timeout_s: float,
        budget: Budget,
    ) -> None:
        super().__init__(name=name, start_timeout_s=start_timeout_s, budget=budget)
        self.node = node
        self.address = node.address
        self._cluster = cluster
        self._spec = spec
        self._num_devices, self._uses_gpus = num_devices, uses_gpus
        self._patience_s = budget.turn_s
        self._engine: RemoteEngine | None = None
        self._activity = Activity()
        self._end_text = "did not start"
        self._reading: dict[str, tuple[str, ...]] = {}
        self._brought: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        self._last_of: dict[str, asyncio.Task[None]] = {}
        self._errands: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------ the engine

    async def _live(self) -> None:
        self.generation += 1
        self._brought.clear()
        self._last_of.clear()
        self._reading.clear()
        self._end_text = "is gone"
        try:
            self._engine = engine = await self._start_engine()
            started = await asyncio.wait_for(engine.started(), self._start_timeout_s)
            if started.refusal:
                self._take(Refused(f"{self.node}: {started.refusal}"))
                return
            self._take(Ready(started.pid))
            while True:
                events, self._activity = await engine.events(self._patience_s)
                for event in events:
                    self._hear(event)
        except (ConnectionError, TimeoutError, EngineError) as exc:
            self._end_text = f"is gone: {exc}"

    async def _start_engine(self) -> RemoteEngine:
        return await self._cluster.start_engine(
            self.node,
            name=self.name,
            num_cpus=self._num_devices,
            num_gpus=self._num_devices if self._uses_gpus else 0,
            build=make_engine,
            spec=self._spec,
            log_level=self._spec.log_level,
        )

    async def _end(self) -> str:
        for errand in list(self._errands):
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        self._kill()
        self._engine = None
        self._activity = Activity()
        return self._end_text

    def _kill(self) -> None:
        if self._engine is not None:
            self._engine.kill()

    def _look(self) -> Activity:
        return self._activity

    # ------------------------------------------------------------------------ jobs

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        for message in outbox:
            if isinstance(message, Cancel):
                self._tell(message)
            else:
                self._send(message)

    def _send(self, job: Job) -> None:
        adapter_id = getattr(job, "adapter_id", "")
        before = self._last_of.get(adapter_id)
        missing = self._bring(job)
        if before is None and not missing:
            self._tell(job)
            return
        task = self._run(self._send_after(job, [*missing, *([before] if before else [])]))
        if adapter_id:
            self._last_of[adapter_id] = task
            task.add_done_callback(lambda done: self._forget_last(adapter_id, done))

    def _tell(self, message: Any) -> None:
        if self._engine is not None:
            self._engine.tell(message)

    async def _send_after(self, job: Job, waits: list[asyncio.Task[None]]) -> None:
        try:
            for task in waits:
                with contextlib.suppress(asyncio.CancelledError):
                    # Other jobs wait for the same task: the end of this wait must not cancel it.
                    await asyncio.shield(task)
        except EngineError as exc:
            self._take(Failed(job_id=job.job_id, message=str(exc), category="server"))
        except ConnectionError:
            self._kill()
        else:
            self._tell(job)

    def _forget_last(self, adapter_id: str, task: asyncio.Task[None]) -> None:
        if self._last_of.get(adapter_id) is task:
            del self._last_of[adapter_id]

    def _hear(self, event: Event | WrittenOnNode) -> None:
        if isinstance(event, WrittenOnNode):
            self._run(self._fetch(event))
        else:
            self._take(event)

    def _forget(self, job_id: str, future: asyncio.Future[Result]) -> None:
        self._reading.pop(job_id, None)
        super()._forget(job_id, future)

    # ------------------------------------------------------------------------ files

    def _bring(self, job: Job) -> list[asyncio.Task[None]]:
        """Begin to bring what a job reads; gives what is still on its way."""
        tasks = []
        paths = job_paths.reads(job)
        if paths:
            self._reading[job.job_id] = paths
        for path in paths:
            task = self._brought.get(path)
            if task is None or (task.done() and (task.cancelled() or task.exception())):
                task = self._brought[path] = self._run(self._bring_one(path))
            self._brought.move_to_end(path)
            tasks.append(task)
        self._drop_oldest()
        return [task for task in tasks if not task.done()]

    async def _bring_one(self, path: str) -> None:
        assert self._engine is not None
        await self._engine.bring(path)

    def _drop_oldest(self) -> None:
        if len(self._brought) <= MAX_BROUGHT:
            return
        in_use = {path for paths in self._reading.values() for path in paths}
        for path in [path for path in self._brought if path not in in_use]:
            if len(self._brought) <= MAX_BROUGHT:
                return
            self._drop(path)

    def _drop(self, path: str) -> None:
        self._brought.pop(path, None)
        self._tell(Forget(path))

    async def _fetch(self, written: WrittenOnNode) -> None:
        """Bring what it wrote here, then say that the job is done."""
        engine = self._engine
        if engine is None:
            return
        try:
            await engine.fetch(written)
        except ConnectionError:
            self._kill()
        except (EngineError, OSError) as exc:
            failed = Failed(job_id=written.done.job_id, message=str(exc), category="server")
            self._take(failed)
        else:
            if written.stays:
                self._brought[written.path] = self._run(asyncio.sleep(0))
            else:
                self._tell(Forget(written.path))
            self._take(written.done)

    def _run(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it tells
