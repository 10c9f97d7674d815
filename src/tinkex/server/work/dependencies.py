"""The parts of the server that lanes, operations and samples work with.

Made once by the service, which owns their lives; nobody replaces a part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinkex.server.files.checkpoints import Shelf
from tinkex.server.guard.quotas import Quotas
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.disk import Room
from tinkex.server.runs.curves import LiveCurves
from tinkex.server.runs.rollouts import Rollouts
from tinkex.server.work.futures import PromiseTable
from tinkex.server.work.gated_pool import GatedPool
from tinkex.server.work.open_work import OpenWork
from tinkex.server.work.results import Results
from tinkex.server.work.sampling_sessions import SamplingSessions
from tinkex.server.work.write_behind import WriteBehind
from tinkex.server.workers.catalog import Catalog
from tinkex.store import Store, User


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    config: ServerConfig
    store: Store
    shelf: Shelf
    workers: GatedPool
    catalog: Catalog
    quotas: Quotas
    open_work: OpenWork
    room: Room
    promises: PromiseTable
    ends: WriteBehind
    results: Results
    curves: LiveCurves
    rollouts: Rollouts
    sampling_sessions: SamplingSessions
    user_of: Callable[[str], Awaitable[User]]
    """The owner of a key, for requests that name another user's."""
