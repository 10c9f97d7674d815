"""What the store gathers in memory outlives a database that takes no more for a while."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from tinkex.store import Store, UsageCount


def set_room(store: Store, pages: int) -> None:
    """SQLite's own limit; 1 is raised to the present size, so that nothing more fits."""
    with store._database.writer.connect() as connection:
        connection.execute(text(f"PRAGMA max_page_count={pages}"))


def count_tokens(store: Store, user: str) -> float:
    return sum(row.count for row in store.usage.events(user, 0, time.time() + 7200))


def test_a_store_without_room_still_closes(tmp_path: Path) -> None:
    store = Store.in_folder(tmp_path, full_sync=False)
    set_room(store, 1)
    store.usage.add(
        UsageCount(kind="training", count=1, user_id=f"{n}" + "x" * 300) for n in range(300)
    )
    store.close()
    again = Store.in_folder(tmp_path)
    assert count_tokens(again, "0" + "x" * 300) == 0, "what found no room is not half there"
    again.close()


def test_token_counts_wait_for_room(tmp_path: Path) -> None:
    store = Store.in_folder(tmp_path, full_sync=False)
    set_room(store, 1)
    users = [f"user-{n:04}" + "x" * 200 for n in range(200)]  # more rows than free pages hold
    store.usage.add(UsageCount(kind="training", count=5, user_id=user) for user in users)
    with pytest.raises(OperationalError, match="full"):
        store.flush()
    store.usage.add([UsageCount(kind="training", count=2, user_id=users[0])])
    time.sleep(1.5)  # the writer tries by itself, and fails again
    set_room(store, 1_000_000)
    store.flush()
    assert [count_tokens(store, user) for user in users] == [7.0] + [5.0] * 199
    store.close()
