"""Numbers about what the SDK did: counters, gauges and latency percentiles.

A `Metrics` listens to the event bus while it is open and keeps totals. It makes no network call and
knows no backend: `snapshot()` gives plain numbers for whatever you log to.

    with tinkex.metrics.Metrics() as metrics:
        train()
    print(metrics.snapshot().latencies["http.request"].p95_s)
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex import events
from tinkex.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Latency:
    """Durations of one kind of operation. Percentiles are of the latest ones kept."""

    num: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All numbers at one moment. It does not change afterwards."""

    counters: Mapping[str, int]
    """Events by name, and HTTP answers by status: `http.status.200`."""
    gauges: Mapping[str, float]
    """What is under way: `http.request.in_flight`."""
    latencies: Mapping[str, Latency]


class Metrics:
    """Totals since it was made. Thread-safe; several may listen at once.

    Args:
        window: How many of the latest durations of each kind the percentiles look at.
    """

    def __init__(self, *, window: int = 4096) -> None:
        if window < 1:
            raise InvalidInputError(f"must be at least 1, got {window}.", path="window")
        self._window = window
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._durations: dict[str, _Durations] = {}
        self._unsubscribe: Callable[[], None] | None = None

    # -- listening

    def start(self) -> Metrics:
        """Listen to the event bus from now on."""
        with self._lock:
            if self._unsubscribe is None:
                self._unsubscribe = events.subscribe(self._on_event)
        return self

    def stop(self) -> None:
        """Stop listening; the numbers stay."""
        with self._lock:
            unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            unsubscribe()

    def __enter__(self) -> Metrics:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- numbers of your own

    def increment(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counters[name] += by

    def set_gauge(self, name: str, value: float) -> None:
        with self._lock:
            self._gauges[name] = value

    def observe(self, name: str, duration_s: float) -> None:
        """Add one duration to the latencies of `name`."""
        with self._lock:
            self._observe(name, duration_s)

    def snapshot(self) -> MetricsSnapshot:
        with self._lock:
            return MetricsSnapshot(
                counters=dict(self._counters),
                gauges=dict(self._gauges),
                latencies={name: d.summary() for name, d in self._durations.items()},
            )

    def reset(self) -> None:
        """Forget totals and durations; gauges stay, because they say what is under way."""
        with self._lock:
            self._counters.clear()
            self._durations.clear()

    # -- inside

    def _on_event(self, event: events.Event) -> None:
        fields = event.fields
        with self._lock:
            self._counters[event.name] += 1
            if (status := fields.get("status_code")) is not None:
                self._counters[f"http.status.{status}"] += 1
            if "span_id" in fields:
                self._on_span(event.name, fields)

    def _on_span(self, name: str, fields: Mapping[str, Any]) -> None:
        operation, _, ending = name.rpartition(".")
        gauge = f"{operation}.in_flight"
        if ending == "start":
            self._gauges[gauge] = self._gauges.get(gauge, 0) + 1
            return
        # A span that began before we listened has no start to take back.
        self._gauges[gauge] = max(0.0, self._gauges.get(gauge, 0) - 1)
        self._observe(operation, float(fields.get("duration_s", 0.0)))

    def _observe(self, name: str, duration_s: float) -> None:
        if name not in self._durations:
            self._durations[name] = _Durations(deque(maxlen=self._window))
        self._durations[name].add(duration_s)


@dataclass(slots=True)
class _Durations:
    latest: deque[float]
    num: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0

    def add(self, duration_s: float) -> None:
        self.latest.append(duration_s)
        self.num += 1
        self.sum_s += duration_s
        self.max_s = max(self.max_s, duration_s)

    def summary(self) -> Latency:
        ordered = sorted(self.latest)
        return Latency(
            num=self.num,
            mean_s=self.sum_s / self.num,
            p50_s=percentile(ordered, 50),
            p95_s=percentile(ordered, 95),
            p99_s=percentile(ordered, 99),
            max_s=self.max_s,
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of an ascending sequence lies, interpolated linearly."""
    if not ordered:
        raise InvalidInputError("needs at least one value.", path="ordered")
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
