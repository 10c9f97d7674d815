"""The parts of the server that lanes, operations and samples work with.

Made once by the service, which owns their lives; nobody replaces a part.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.server.files.checkpoints import Shelf
from tinkex.server.files.disk_quota import DiskQuota
from tinkex.server.guard.auth import Auth
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.guard.quotas import Quotas
from tinkex.server.jobs.score_cache import ScoreCache
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.disk import Room
from tinkex.server.runs.curves import LiveCurves
from tinkex.server.runs.rates import MeasuredRates
from tinkex.server.runs.rollouts import Rollouts
from tinkex.server.runs.timeline import Timelines
from tinkex.server.work.futures import PromiseTable
from tinkex.server.work.gated_pool import GatedPool
from tinkex.server.work.open_work import OpenWork
from tinkex.server.work.results import Results
from tinkex.server.work.sampling_sessions import SamplingSessions
from tinkex.server.work.write_behind import WriteBehind
from tinkex.server.workers.catalog import Catalog
from tinkex.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    config: ServerConfig
    store: Store
    shelf: Shelf
    workers: GatedPool
    catalog: Catalog
    quotas: Quotas
    disk_quota: DiskQuota
    open_work: OpenWork
    room: Room
    promises: PromiseTable
    ends: WriteBehind
    results: Results
    curves: LiveCurves
    rollouts: Rollouts
    timelines: Timelines
    rates: MeasuredRates
    sampling_sessions: SamplingSessions
    teacher_scores: ScoreCache
    auth: Auth
    failed_logins: FailedLogins
    """Where wrong keys count that a request names."""
