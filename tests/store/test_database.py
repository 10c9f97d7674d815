"""Opening, migrating and closing a database."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from recorded_database import unpack
from sqlalchemy import create_engine, inspect, text
from store_rows import op

from tinkex.errors import ConfigError
from tinkex.store import Store, StoreClosedError
from tinkex.store.database import MIGRATIONS, NEWEST_REVISION, _with_driver
from tinkex.store.schema import metadata


def _differences(store: Store) -> list[object]:
    with store._database.writer.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, metadata))


def test_a_new_database_has_exactly_the_tables_of_the_schema(store: Store) -> None:
    assert _differences(store) == []


def test_the_revisions_make_them_of_a_recorded_database_too(tmp_path: Path) -> None:
    """Only databases that exist go through revisions: a change of the schema needs one."""
    unpack(tmp_path)
    store = Store.in_folder(tmp_path)
    assert _differences(store) == []
    with store._database.writer.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == NEWEST_REVISION
    assert store.journal.unfinished_models()
    store.close()


def test_a_new_database_has_the_mark_that_the_last_revision_leaves(url: str) -> None:
    scripts = ScriptDirectory(str(MIGRATIONS))
    assert scripts.get_heads() == [NEWEST_REVISION]
    store = Store(url)
    with store._database.writer.connect() as connection:
        context = MigrationContext.configure(connection)
        assert context.get_current_revision() == NEWEST_REVISION
        made = inspect(connection).get_columns("alembic_version")
        assert inspect(connection).get_pk_constraint("alembic_version")["name"] == (
            context._version.primary_key.name
        )
    assert [column["name"] for column in made] == [c.name for c in context._version.columns]
    store.close()


def test_opening_a_database_again_changes_nothing(url: str) -> None:
    first = Store(url)
    first.accounts.ensure_user("ann", name="Ann")
    first.close()
    again = Store(url)
    user = again.accounts.get_user("ann")
    assert user is not None
    assert user.name == "Ann"
    again.close()


@pytest.mark.parametrize("revision", ["0001", "0009"])
def test_a_database_from_before_the_first_release_is_refused_with_the_way_out(
    url: str, revision: str
) -> None:
    Store(url).close()
    engine = create_engine(_with_driver(url))
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :v"), {"v": revision})
    engine.dispose()
    with pytest.raises(ConfigError, match=f"revision {revision}.*commit e232661"):
        Store(url)


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
