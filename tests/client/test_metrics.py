"""Counters, gauges and percentiles (R20)."""

from __future__ import annotations

import numpy as np
import pytest

import tinkex
from tinkex import events
from tinkex.client.metrics import Metrics, percentile
from tinkex.errors import InvalidInputError


def test_events_become_counters_statuses_and_latencies():
    """R20."""
    with Metrics() as metrics:
        for status in (200, 200, 503):
            with events.span("http.request", path="/x") as span:
                span.add(status_code=status)
        events.emit("http.retry", attempt=1)
    snapshot = metrics.snapshot()
    assert snapshot.counters["http.request.stop"] == 3
    assert snapshot.counters["http.status.200"] == 2
    assert snapshot.counters["http.status.503"] == 1
    assert snapshot.counters["http.retry"] == 1
    assert snapshot.latencies["http.request"].num == 3
    assert snapshot.gauges["http.request.in_flight"] == 0


def test_a_gauge_says_what_is_under_way_and_survives_an_exception():
    with Metrics() as metrics:
        with events.span("training"):
            assert metrics.snapshot().gauges["training.in_flight"] == 1
        with pytest.raises(ZeroDivisionError), events.span("training"):
            raise ZeroDivisionError
    assert metrics.snapshot().gauges["training.in_flight"] == 0
    assert metrics.snapshot().counters["training.exception"] == 1


@pytest.mark.parametrize("num", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_those_of_numpy(num):
    values = np.random.default_rng(num).exponential(size=num)
    for percent in (50, 95, 99):
        ours = percentile(sorted(values), percent)
        assert ours == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_latencies_summarise_all_and_rank_the_latest():
    metrics = Metrics(window=100)
    for ms in range(1000):
        metrics.observe("x", ms / 1000)
    latency = metrics.snapshot().latencies["x"]
    assert latency.num == 1000
    assert latency.mean_s == pytest.approx(0.4995)
    assert latency.max_s == 0.999
    assert latency.p50_s == pytest.approx(0.9495)


def test_a_snapshot_does_not_change_and_a_reset_starts_over():
    metrics = Metrics()
    metrics.increment("n", 2)
    metrics.set_gauge("depth", 3.5)
    before = metrics.snapshot()
    metrics.increment("n")
    metrics.reset()
    assert before.counters == {"n": 2}
    assert metrics.snapshot().counters == {}
    assert metrics.snapshot().gauges == {"depth": 3.5}


def test_after_stop_nothing_is_counted():
    metrics = Metrics().start()
    metrics.start()
    metrics.stop()
    metrics.stop()
    events.emit("x.y")
    assert metrics.snapshot().counters == {}


def test_bad_numbers_are_refused():
    with pytest.raises(InvalidInputError, match="window"):
        Metrics(window=0)
    with pytest.raises(InvalidInputError, match="at least one"):
        percentile([], 50)


def test_it_is_reachable_from_the_package():
    assert tinkex.metrics.Metrics is Metrics
