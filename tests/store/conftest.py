"""Every store test runs twice: on a SQLite file, and on a real PostgreSQL of its own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from postgres_cluster import Cluster, NoPostgresError, start_cluster

from tinkex.store import Store

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    try:
        started = start_cluster()
    except NoPostgresError as exc:
        pytest.skip(str(exc))
    yield started
    started.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database; on PostgreSQL a schema of its own, which costs far less."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tinkex.db'}"
    cluster: Cluster = request.getfixturevalue("cluster")
    name = f"test_{next(_numbers)}"
    with psycopg.connect(cluster.url("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{cluster.url('postgres')}&options=-csearch_path%3D{name}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store(url, full_sync=False)
    yield opened
    opened.close()
