"""INSERT ... ON CONFLICT in the dialect of the connection: the one place where the two differ."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_for(connection: Connection, table: Table) -> Any:
    """An insert that offers `on_conflict_do_nothing` and `on_conflict_do_update`."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def insert_or_ignore(connection: Connection, table: Table) -> Any:
    return insert_for(connection, table).on_conflict_do_nothing()


def insert_or_replace(connection: Connection, table: Table) -> Any:
    """On a repeated primary key, every other column takes the new value."""
    statement = insert_for(connection, table)
    keys = [column.name for column in table.primary_key]
    others = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


def insert_or_add(connection: Connection, table: Table, column: str) -> Any:
    """On a repeated primary key, `column` grows by the new value."""
    statement = insert_for(connection, table)
    keys = [key.name for key in table.primary_key]
    total = table.c[column] + statement.excluded[column]
    return statement.on_conflict_do_update(index_elements=keys, set_={column: total})
