"""INSERT ... ON CONFLICT in the dialect of the connection: the one place where the two differ."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import sqlite

# Building a statement costs more than running it, so each is built once per dialect.


def insert_or_ignore(connection: Connection, table: Table) -> Any:
    return _ignore(connection.dialect.name, table)


def insert_or_replace(connection: Connection, table: Table) -> Any:
    """On a repeated primary key, every other column takes the new value."""
    return _replace(connection.dialect.name, table)


def insert_or_add(connection: Connection, table: Table, column: str) -> Any:
    """On a repeated primary key, `column` grows by the new value."""
    return _add(connection.dialect.name, table, column)


def _insert(dialect: str, table: Table) -> Any:
    """An insert that offers `on_conflict_do_nothing` and `on_conflict_do_update`."""
    if dialect == "postgresql":
        from sqlalchemy.dialects import postgresql  # heavy, and needed by who stores there

        return postgresql.insert(table)
    return sqlite.insert(table)


@cache
def _ignore(dialect: str, table: Table) -> Any:
    return _insert(dialect, table).on_conflict_do_nothing()


@cache
def _replace(dialect: str, table: Table) -> Any:
    statement = _insert(dialect, table)
    keys = [column.name for column in table.primary_key]
    others = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


@cache
def _add(dialect: str, table: Table, column: str) -> Any:
    statement = _insert(dialect, table)
    keys = [key.name for key in table.primary_key]
    total = table.c[column] + statement.excluded[column]
    return statement.on_conflict_do_update(index_elements=keys, set_={column: total})
