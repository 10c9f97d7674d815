"""Opening, migrating and closing a database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Insert, column, create_engine, insert
from sqlalchemy import table as sql_table
from store_rows import op

from tinkex.errors import ConfigError
from tinkex.store import Store, StoreClosedError, UsageCount
from tinkex.store.database import MIGRATIONS, _with_driver
from tinkex.store.schema import metadata


def test_the_migrations_make_exactly_the_tables_of_the_schema(store: Store) -> None:
    with store._database.writer.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


@contextmanager
def _at_version(url: str, version: str) -> Iterator[Connection]:
    """An empty database as an older Tinkex made it."""
    engine, config = create_engine(_with_driver(url)), Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, version)
        yield connection
    engine.dispose()


def _insert(table: str, row: dict[str, Any]) -> Insert:
    return insert(sql_table(table, *map(column, row))).values(row)


def test_opening_a_database_again_changes_nothing(url: str) -> None:
    first = Store(url)
    first.accounts.ensure_user("ann", name="Ann")
    first.close()
    again = Store(url)
    user = again.accounts.get_user("ann")
    assert user is not None
    assert user.name == "Ann"
    again.close()


def test_an_admin_key_of_an_older_database_stays_one(url: str) -> None:
    with _at_version(url, "0005") as connection:
        for name, is_admin in (("root", True), ("ann", False)):
            row = {"key_hash": name, "user_id": name, "name": name, "note": "", "created_at": 1.0}
            connection.execute(_insert("api_keys", row | {"is_admin": is_admin}))
    again = Store(url)
    assert [key.role for key in again.accounts.all_keys()] == ["admin", "user"]
    again.close()


def test_usage_of_an_older_database_stays_and_its_keys_are_not_known(url: str) -> None:
    with _at_version(url, "0008") as connection:
        names = ("session_id", "model_id", "base_model", "project_id")
        row = {"bucket_start": 3600, "user_id": "ann", "kind": "training", "count": 3.0}
        connection.execute(_insert("usage", row | dict.fromkeys(names, "")))
    again = Store(url)
    again.usage.add([UsageCount(kind="training", count=4, user_id="ann", key_id=2)])
    again.flush()
    used = again.usage.used("key", 0.0, 10)
    assert [(one.key_id, one.counts) for one in used] == [
        (2, {"training": 4}),
        (0, {"training": 3}),
    ]
    again.close()


@pytest.mark.parametrize("bad", ["sqlite://", "mysql://x/y", "nonsense", "sqlite:///:memory:"])
def test_a_database_that_is_not_supported_is_refused_by_name(bad: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://"):
        Store(bad)


def test_closing_commits_what_waits_and_refuses_more(tmp_path: Path) -> None:
    store = Store.in_folder(tmp_path / "new")
    pending = [store.journal.append(op(n)) for n in range(300)]
    store.close()
    assert all(future.done() for future in pending)
    with pytest.raises(StoreClosedError):
        store.journal.append(op(301))


async def test_calls_run_off_the_event_loop_and_appends_are_awaitable(store: Store) -> None:
    user = await store.call(store.accounts.ensure_user, "ann")
    appended = await asyncio.wrap_future(store.journal.append(op(1)))
    assert user.user_id == "ann"
    assert appended


def test_a_failed_write_does_not_stop_the_writer(store: Store) -> None:
    def broken(connection: object) -> None:
        raise ValueError("no")

    futures = [store._writer.submit(broken), store.journal.append(op(1))]
    with pytest.raises(ValueError, match="no"):
        futures[0].result(timeout=60)
    assert futures[1].result(timeout=60)


def test_a_second_server_on_the_same_database_is_refused_until_the_first_is_gone(url: str) -> None:
    """Two servers would replay one journal; the claim goes with its holder, however it ends."""
    first, second = Store(url), Store(url)
    first.claim()
    with pytest.raises(ConfigError, match="Another server"):
        second.claim(timeout_s=0.2)
    first.close()
    second.claim(timeout_s=5)
    second.close()
