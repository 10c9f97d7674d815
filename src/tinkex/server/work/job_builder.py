"""Turn a queued request into the job that an engine runs.

A request was judged when it came, but its turn may come much later, or again after a crash: what it
needs is read back from the journal where it was not kept, and what can no longer be done is an
outcome instead of a job. Nothing here changes the state of a model.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from tinkex.engine.jobs import Job, TrainJob
from tinkex.errors import InvalidInputError
from tinkex.server.process import disk
from tinkex.server.process.off_loop import off_loop
from tinkex.server.work.futures import Outcome
from tinkex.server.work.operation import Operation, OperationRun
from tinkex.server.work.queued_request import QueuedRequest
from tinkex.store import Model, Store

logger = logging.getLogger(__name__)


class JobBuilder:
    def __init__(self, store: Store, project_id: str | None) -> None:
        self._store = store
        self._project_id = project_id
        self._num_built = 0

    async def build(self, request: QueuedRequest, model: Model) -> Job | Outcome:
        """The job of a request; the outcome when there is nothing to run, or it cannot be run."""
        assert request.operation is not None
        self._num_built += 1
        try:
            checked = await self._checked(request, request.operation, model)
            job = await request.operation.job(checked, self.run_of(request, model))
        except InvalidInputError as exc:
            return Outcome(error=str(exc), category="user")
        except Exception as exc:  # no room for a folder, no answer from the database
            logger.exception("%s cannot be run", request.request_id)
            return Outcome(error=disk.describe(exc), category="server")
        is_replay = request.mode == "replay"
        if isinstance(job, TrainJob) and (request.suspicion.on_trial or is_replay):
            job = replace(job, alone=request.suspicion.on_trial, is_replay=is_replay)
        if not isinstance(job, Outcome):
            request.job = job
        return job

    async def complete(self, request: QueuedRequest, model: Model, job: Job) -> Job:
        """The job with what had to be computed before it."""
        assert request.operation is not None
        run = self.run_of(request, model)
        request.job = await request.operation.complete(request.checked, run, job)
        return request.job

    async def _checked(
        self, request: QueuedRequest, operation: Operation[Any], model: Model
    ) -> Any:
        """The request as its `check` gave it on arrival, read again where it was not kept."""
        if request.spilled:
            body = await self._store.call(self._store.journal.body, request.request_id)
            if body is None:
                raise InvalidInputError(f"the body of {request.request_id} left the journal")
            request.body, request.spilled = body, False
        if request.checked is None:
            size = len(request.body)
            request.checked = await off_loop(size, operation.unpack, request.body, model)
        return request.checked

    async def spends(self, request: QueuedRequest, model: Model) -> dict[str, float]:
        """The most that a request from the journal uses of budgets; nothing if it cannot be run."""
        assert request.operation is not None
        size, unpack = len(request.body), request.operation.unpack
        try:
            checked = await off_loop(size, unpack, request.body, model)
        except InvalidInputError:  # as it will be told when its turn comes
            return {}
        return request.operation.spends(checked, model)

    def run_of(self, request: QueuedRequest, model: Model) -> OperationRun:
        """The names under which a request runs this time; a job's never repeats."""
        return OperationRun(
            model=model,
            project_id=self._project_id,
            key_id=request.key_id,
            request_id=request.request_id,
            job_id=f"{request.request_id}#{self._num_built}",
        )
