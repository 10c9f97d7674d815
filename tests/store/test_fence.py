"""A server that lost its database to another writes nothing any more."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg
import pytest
from store_rows import op

from tinkex.errors import ConfigError
from tinkex.store import Store
from tinkex.store.claim import FencedError


def needs_postgresql(url: str) -> None:
    if not url.startswith("postgresql"):
        pytest.skip("the lock of a file does not die before its process")


def test_a_claim_ends_the_writes_of_the_one_before(url: str) -> None:
    needs_postgresql(url)
    first, second = Store(url), Store(url)
    told = threading.Event()
    first.on_fenced(told.set)
    first.claim()
    assert first.journal.append(op(5)).result(timeout=60)
    first._claim.release()  # as when its connection to PostgreSQL dies
    second.claim(timeout_s=60)
    with pytest.raises(FencedError, match="took over"):
        first.journal.append(op(6)).result(timeout=60)
    assert told.wait(60)
    assert second.journal.append(op(6)).result(timeout=60)
    first.close()
    second.close()


def test_a_lock_that_dies_with_its_connection_lets_only_one_write(
    new_url: Callable[[], str], request: pytest.FixtureRequest
) -> None:
    """The review had both servers accept number 5."""
    url = new_url()
    needs_postgresql(url)
    first, second = Store(url), Store(url)
    first.claim()
    with pytest.raises(ConfigError):
        second.claim(timeout_s=0.3)
    cluster = request.getfixturevalue("cluster")
    with psycopg.connect(cluster.url("postgres"), autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
    second.claim(timeout_s=60)
    assert second.journal.append(op(5)).result(timeout=60)
    for _ in range(10):  # the first ones find the connection gone
        failure = first.journal.append(op(5)).exception(timeout=60)
        assert failure is not None
        if isinstance(failure, FencedError):
            break
    assert isinstance(failure, FencedError)
    second.close()
    first.close()


def test_a_writer_without_a_claim_has_no_fence(url: str) -> None:
    server, tool = Store(url), Store(url)
    server.claim()
    tool.accounts.ensure_user("ann")
    assert server.journal.append(op(1)).result(timeout=60)
    tool.close()
    server.close()
