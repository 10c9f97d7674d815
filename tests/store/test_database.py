"""Opening, migrating and closing a database."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from store_rows import op

from tinkex.errors import ConfigError
from tinkex.store import Store, StoreClosedError, UsageCount
from tinkex.store.database import MIGRATIONS
from tinkex.store.schema import metadata


def test_the_migrations_make_exactly_the_tables_of_the_schema(store: Store) -> None:
    with store._database.writer.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


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
    store = Store(url)
    store.accounts.add_key("tml-root", "root", role="admin")
    store.accounts.add_key("tml-ann", "ann")
    with store._database.writer.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.downgrade(config, "0005")
    store.close()
    again = Store(url)
    assert [key.role for key in again.accounts.all_keys()] == ["admin", "user"]
    again.close()


def test_usage_of_an_older_database_stays_and_its_keys_are_not_known(url: str) -> None:
    store = Store(url)
    counts = [
        UsageCount(kind="training", count=number, user_id="ann", key_id=number) for number in (1, 2)
    ]
    store.usage.add(counts)
    store.flush()
    with store._database.writer.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.downgrade(config, "0008")
    store.close()
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
    assert appended.created


def test_a_failed_write_does_not_stop_the_writer(store: Store) -> None:
    def broken(connection: object) -> None:
        raise ValueError("no")

    futures = [store._writer.submit(broken), store.journal.append(op(1))]
    with pytest.raises(ValueError, match="no"):
        futures[0].result(timeout=10)
    assert futures[1].result(timeout=10).created


def test_a_second_server_on_the_same_database_is_refused_until_the_first_is_gone(url: str) -> None:
    """Two servers would replay one journal; the claim goes with its holder, however it ends."""
    first, second = Store(url), Store(url)
    first.claim()
    with pytest.raises(ConfigError, match="Another server"):
        second.claim(timeout_s=0.2)
    first.close()
    second.claim(timeout_s=5)
    second.close()
