"""Tell how a job ended: done, failed or cancelled. A receiver that fails harms nobody else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from tinkex.engine import jobs
from tinkex.errors import EngineError, TinkerError

log = logging.getLogger(__name__)


def tell(emit: jobs.Emit, event: jobs.Event) -> None:
    """Emit; a receiver that fails must not take the engine with it."""
    try:
        emit(event)
    except Exception:
        log.exception("the receiver of an event of job %s failed", event.job_id)


def attempt(job: jobs.Job, emit: jobs.Emit, action: Callable[[], jobs.Result | None]) -> None:
    """Run something for a job and tell how it ended; None means that it goes on elsewhere."""
    try:
        result = action()
    except Exception as exc:
        tell(emit, failure(job.job_id, exc))
    else:
        if result is not None:
            tell(emit, jobs.Done(job_id=job.job_id, result=result))


def safely(emit: jobs.Emit) -> jobs.Emit:
    return lambda event: tell(emit, event)


def cancelled(job_id: str) -> jobs.Failed:
    return jobs.Failed(job_id=job_id, message=f"job {job_id} was cancelled", category="cancelled")


def failure(job_id: str, exc: Exception) -> jobs.Failed:
    """The event of an error: a user's mistake as it is; anything else is ours, and logged."""
    category: Literal["user", "server"] = "server"
    message = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, TinkerError) and not isinstance(exc, EngineError):
        category, message = "user", str(exc)
    elif isinstance(exc, EngineError):
        message = str(exc)
    if category == "server":
        log.error("job %s failed", job_id, exc_info=exc)
    code = getattr(exc, "code", "")
    return jobs.Failed(job_id=job_id, message=message, category=category, code=code)
