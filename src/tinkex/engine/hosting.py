"""Messages between a server and a process that hosts an engine.

Three kinds of processes use them: a worker behind a socket (`server/workers/child.py`), an
actor on a node of a cluster (`cluster/engine_host.py`), and a member of a group, which has a part
of an engine and takes calls instead of jobs (`group/follower.py`). How messages travel is theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinkex.engine.jobs import Emit, Failed, Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """The process exists and takes work."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot run with these settings; starting it again would not help."""

    text: str


@dataclass(frozen=True, slots=True)
class Cancel:
    job_id: str


@contextmanager
def submitting(job: Job, emit: Emit) -> Iterator[None]:
    """A job that cannot be submitted ends with `Failed`: whoever sends one gets an end of it."""
    try:
        yield
    except Exception as exc:
        logger.exception("submit failed")
        emit(Failed(job_id=job.job_id, message=str(exc), category="server"))
