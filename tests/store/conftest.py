"""Every store test runs twice: on a SQLite file, and on a real PostgreSQL of its own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
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
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Gives URLs of empty databases; on PostgreSQL each a schema, which costs far less."""

    def make() -> str:
        name = f"test_{next(_numbers)}"
        if request.param == "sqlite":
            return f"sqlite:///{tmp_path / name}.db"
        cluster: Cluster = request.getfixturevalue("cluster")
        with psycopg.connect(cluster.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{cluster.url('postgres')}&options=-csearch_path%3D{name}"

    return make


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store(url, full_sync=False)
    yield opened
    opened.close()
