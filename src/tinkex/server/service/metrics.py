"""What operators watch: requests, latencies, queues, promises and workers, in Prometheus text.

Counters are plain integers updated on the event loop; gauges are read when asked for. Nothing here
names a session or a model. Users are named to administrators only, and at most `MAX_USERS` of them:
who comes later is counted as `other`, so that the number of series has a bound.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tinkex.server.service.service import Service

LAG_EVERY_S = 0.25
MAX_USERS = 100
OTHER = "other"
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


MAX_SLOW = 20
SLOW_S = 1.0
SLOW_TTL_S = 86_400.0
_WAITS = ("retrieve_future", "/live", "stream", "/v1/chat", "/v1/completions", "/v1/responses")
"""Parts of routes that are held until there is something to say."""


@dataclass(frozen=True, slots=True, order=True)
class _Slow:
    seconds: float
    at: float
    route: str
    status: int
    user: str


class SlowRequests:
    """The slowest requests of a day, of those that do not wait by design."""

    def __init__(self) -> None:
        self._slowest: list[_Slow] = []

    def note(self, route: str, status: int, seconds: float, user: str) -> None:
        if seconds < SLOW_S or any(part in route for part in _WAITS):
            return
        now = time.time()
        self._slowest = [slow for slow in self._slowest if now - slow.at < SLOW_TTL_S]
        self._slowest.append(_Slow(seconds, now, route, status, user))
        self._slowest = sorted(self._slowest, reverse=True)[:MAX_SLOW]

    def told(self) -> list[dict[str, Any]]:
        return [asdict(slow) for slow in self._slowest]


class Answered(Collector):
    """Requests by route: how many of each status, and how long they took.

    Counted in plain integers and told when asked: the counters of the library take a lock each.
    """

    def __init__(self) -> None:
        self._counts: Counted[tuple[str, int]] = Counted()
        self._spans: dict[str, list[int]] = {}  # requests of a route by their time
        self._seconds: dict[str, float] = {}

    def note(self, route: str, status: int, seconds: float) -> None:
        self._counts[route, status] += 1
        spans = self._spans.get(route)
        if spans is None:
            spans = self._spans[route] = [0] * (len(_BUCKETS) + 1)
            self._seconds[route] = 0.0
        spans[bisect_left(_BUCKETS, seconds)] += 1
        self._seconds[route] += seconds

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "tinkex_http_requests", "Requests answered", labels=["route", "status"]
        )
        for (route, status), count in self._counts.items():
            requests.add_metric([route, str(status)], count)
        latency = HistogramMetricFamily(
            "tinkex_http_seconds", "Time to answer, polls included", labels=["route"]
        )
        bounds = [str(float(bound)) for bound in _BUCKETS] + ["+Inf"]
        for route, spans in self._spans.items():
            buckets = list(zip(bounds, map(float, accumulate(spans)), strict=True))
            latency.add_metric([route], buckets, self._seconds[route])
        return requests, latency


class AnsweredUsers(Collector):
    """Requests by user and kind of status, counted alike."""

    def __init__(self) -> None:
        self.counts: Counted[tuple[str, int]] = Counted()

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "tinkex_user_requests", "Requests of a user", labels=["user", "status"]
        )
        for (user, kind), count in self.counts.items():
            requests.add_metric([user, f"{kind}xx"], count)
        return (requests,)


_GAUGES = (
    ("promises", "Promises in memory"),
    ("lanes", "Models with state or requests in memory"),
    ("queued_samples", "Samples waiting for a place"),
    ("queued_training", "Training requests waiting for a place"),
    ("workers_ready", "Workers that take jobs"),
    ("nodes", "Machines with workers"),
    ("nodes_left_out", "Machines of the cluster that cannot be used"),
    ("worker_starts", "Worker processes started since the server started"),
    ("uptime_seconds", "Seconds since the server started"),
    ("memory_bytes", "Memory of the API process"),
    ("held_body_bytes", "Request bodies under way"),
    ("kept_result_memory_bytes", "Sample results in memory that nobody fetched yet"),
    ("kept_result_bytes", "The same with those on disk"),
    ("disk_free_bytes", "Room left for the data folder"),
    ("loop_lag_seconds", "Longest time the event loop was held up since last asked"),
    ("connections", "Open connections"),
    ("connections_refused", "Connections refused since the server started"),
)


class ServerMetrics:
    """The registry of one app: several apps may live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answered = Answered()
        self._registry.register(self._answered)
        self._telemetry = Counter(
            "tinkex_client_events", "Events clients reported", ["severity"], registry=self._registry
        )
        self._worker_memory = Gauge(
            "tinkex_worker_memory_bytes",
            "Memory of a worker: base, packed, kv, adapters, snapshots, and its whole process",
            ["worker", "kind"],
            registry=self._registry,
        )
        self._worker_use = Gauge(
            "tinkex_worker_utilisation",
            "Share of the last minute that a worker was busy",
            ["worker"],
            registry=self._registry,
        )
        self._users = CollectorRegistry()
        self._answered_users = AnsweredUsers()
        self._users.register(self._answered_users)
        self._user_gauges = {
            name: Gauge(f"tinkex_user_{name}", text, ["user"], registry=self._users)
            for name, text in (
                ("open_requests", "Training requests and samples of a user that wait or run"),
                ("result_bytes", "Samples of a user that wait to be fetched"),
            )
        }
        self._named: set[str] = set()
        self._gauges = {
            name: Gauge(f"tinkex_{name}", text, registry=self._registry) for name, text in _GAUGES
        }
        self._training = Gauge(
            "tinkex_training_seconds",
            "Seconds of training passes and steps since the server started",
            ["phase"],
            registry=self._registry,
        )
        self._started = time.monotonic()
        self.slow = SlowRequests()
        self._worst_lag_s = 0.0

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started

    def _name_of(self, user_id: str) -> str:
        if user_id not in self._named:
            if len(self._named) >= MAX_USERS:
                return OTHER
            self._named.add(user_id)
        return user_id

    def observe(self, route: str, status: int, seconds: float, user: str = "") -> None:
        if user:
            self._answered_users.counts[self._name_of(user), status // 100] += 1
        self._answered.note(route, status, seconds)
        if seconds >= SLOW_S:
            self.slow.note(route, status, seconds, user)

    def count_telemetry(self, severities: Iterable[str]) -> None:
        known = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
        for severity in severities:
            self._telemetry.labels(severity if severity in known else "unknown").inc()

    async def watch_loop(self) -> None:
        """Measure, until cancelled, how long others hold the event loop up."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(LAG_EVERY_S)
            late_s = time.monotonic() - started - LAG_EVERY_S
            self._worst_lag_s = max(self._worst_lag_s, late_s)

    def render(self, service: Service, *, with_users: bool = False, **others: float) -> bytes:
        workers = service.workers
        worst_lag_s, self._worst_lag_s = self._worst_lag_s, 0.0
        values = {
            "memory_bytes": process_memory(),
            "kept_result_memory_bytes": service.kept.memory_bytes,
            "kept_result_bytes": service.kept.kept_bytes,
            "disk_free_bytes": shutil.disk_usage(service.config.data_dir).free,
            "loop_lag_seconds": worst_lag_s,
            **others,
            "promises": len(service.promises),
            "lanes": service.num_lanes,
            "queued_samples": workers.sampling.num_waiting,
            "queued_training": workers.training.num_waiting,
            "workers_ready": workers.pool.num_ready,
            "nodes": workers.pool.num_nodes,
            "nodes_left_out": workers.pool.num_left_out,
            "worker_starts": workers.pool.generation,
            "uptime_seconds": self.uptime_s,
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        for phase in ("compute", "wait", "reduce", "transfer"):
            self._training.labels(phase).set(workers.pool.seconds.get(phase, 0.0))
        self._worker_memory.clear()
        self._worker_use.clear()
        for member in service.workers.pool.members:
            self._worker_use.labels(member.name).set(member.utilisation)
            for kind, size_bytes in member.held_bytes.items():
                self._worker_memory.labels(member.name, kind).set(size_bytes)
        text = generate_latest(self._registry)
        return text + self._render_users(service) if with_users else text

    def _render_users(self, service: Service) -> bytes:
        open_work, kept = service.open_work.by_user, service.kept.by_user
        for name, amounts in (("open_requests", open_work), ("result_bytes", kept)):
            sums = dict.fromkeys(self._named, 0)
            for user_id, amount in amounts.items():
                label = self._name_of(user_id)
                sums[label] = sums.get(label, 0) + amount
            for label, total in sums.items():
                self._user_gauges[name].labels(label).set(total)
        return generate_latest(self._users)


def process_memory(pid: int | None = None) -> int:
    """Bytes that a process, this one by default, has in memory; 0 where that is not known."""
    try:
        return (
            int(Path(f"/proc/{'self' if pid is None else pid}/statm").read_text().split()[1]) * 4096
        )
    except (OSError, IndexError, ValueError):  # no /proc here
        return 0
