"""Users and their API keys.

A key is stored only as its SHA-256: keys are long and random, so a slow hash would add nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, func, insert, select, update

from tinkex.store import schema
from tinkex.store.records import ApiKey, User
from tinkex.store.upsert import insert_or_ignore
from tinkex.store.writer import GroupWriter


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Accounts:
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer

    def ensure_user(self, user_id: str, *, name: str = "", email: str = "") -> User:
        """The user of that id, made when absent; an existing one keeps its name and email."""
        row: dict[str, Any] = {"user_id": user_id, "name": name or user_id, "email": email}
        row["created_at"] = time.time()

        def write(connection: Connection) -> None:
            connection.execute(insert_or_ignore(connection, schema.users), row)

        self._writer.run(write)
        user = self.get_user(user_id)
        assert user is not None
        return user

    def get_user(self, user_id: str) -> User | None:
        with self._reader.connect() as connection:
            query = select(schema.users).where(schema.users.c.user_id == user_id)
            row = connection.execute(query).mappings().first()
        return _user(row) if row else None

    def users(self, limit: int, offset: int = 0, *, search: str = "") -> tuple[list[User], int]:
        """A page of all users in the order of their ids, and how many there are.

        With `search` only those whose id has it as a part, in whatever case.
        """
        column = schema.users.c.user_id
        where = [column.icontains(search, autoescape=True)] if search else []
        query = select(schema.users).where(*where).order_by(column).limit(limit).offset(offset)
        count = select(func.count()).select_from(schema.users).where(*where)
        with self._reader.connect() as connection:
            total = connection.execute(count).scalar_one()
            return [_user(row) for row in connection.execute(query).mappings()], int(total)

    def disable(self, user_id: str, at: float | None) -> None:
        """Refuse a user from a moment on; None lets it in again."""
        self._change(user_id, {"disabled_at": at})

    def set_quotas(self, user_id: str, quotas: dict[str, float]) -> None:
        """The limits of a user that differ from the server's, all of them."""
        self._change(user_id, {"quotas": quotas})

    def _change(self, user_id: str, values: dict[str, Any]) -> None:
        statement = update(schema.users).where(schema.users.c.user_id == user_id).values(values)
        self._writer.run(lambda connection: connection.execute(statement))

    def add_key(
        self,
        key: str,
        user_id: str,
        *,
        name: str = "",
        note: str = "",
        role: str = "user",
        requests_per_minute: float = 0.0,
    ) -> ApiKey:
        """Let `key` act for `user_id`. Adding it again returns the first record, not revoked."""
        row: dict[str, Any] = {"key_hash": hash_key(key), "user_id": user_id}
        row |= {"name": name or f"key of {user_id}", "role": role}
        row |= {"note": note, "created_at": time.time(), "revoked_at": None}
        row["requests_per_minute"] = requests_per_minute
        keys = schema.api_keys

        def write(connection: Connection) -> None:
            known = connection.execute(
                update(keys)
                .where(keys.c.key_hash == row["key_hash"])
                .values(user_id=user_id, note=note, revoked_at=None, role=role)
            )
            if known.rowcount == 0:
                connection.execute(insert(keys), row)

        self._writer.run(write)
        found = self.find_key(key)
        assert found is not None
        return found

    def find_key(self, key: str) -> ApiKey | None:
        """The record of a key that is not revoked."""
        keys = schema.api_keys
        query = select(keys).where(keys.c.key_hash == hash_key(key), keys.c.revoked_at.is_(None))
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        return _api_key(row) if row else None

    def get_key(self, key_id: int) -> ApiKey | None:
        """The record of a key, revoked or not."""
        query = select(schema.api_keys).where(schema.api_keys.c.key_id == key_id)
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        return _api_key(row) if row else None

    def keys(self, user_ids: Sequence[str]) -> list[ApiKey]:
        """Every key of some users, revoked ones too, in the order they were added."""
        return self._keys(schema.api_keys.c.user_id.in_(user_ids))

    def all_keys(self) -> list[ApiKey]:
        """Every key of all users, revoked ones too, in the order they were added."""
        return self._keys()

    def keys_numbered(self, key_ids: Sequence[int]) -> list[ApiKey]:
        """Some keys, revoked or not."""
        return self._keys(schema.api_keys.c.key_id.in_(key_ids))

    def active_keys(self) -> list[ApiKey]:
        """Every key that is not revoked, of all users."""
        return self._keys(schema.api_keys.c.revoked_at.is_(None))

    def newest_keys(self, limit: int, *, search: str = "") -> tuple[list[ApiKey], int]:
        """The keys that are not revoked, newest first, and how many there are.

        With `search` only those of users whose id has it as a part.
        """
        keys = schema.api_keys
        where: list[ColumnElement[bool]] = [keys.c.revoked_at.is_(None)]
        where += [keys.c.user_id.icontains(search, autoescape=True)] if search else []
        count = select(func.count()).select_from(keys).where(*where)
        query = select(keys).where(*where).order_by(keys.c.key_id.desc()).limit(limit)
        with self._reader.connect() as connection:
            total = int(connection.execute(count).scalar_one())
            return [_api_key(row) for row in connection.execute(query).mappings()], total

    def _keys(self, *where: Any) -> list[ApiKey]:
        query = select(schema.api_keys).where(*where).order_by(schema.api_keys.c.key_id)
        with self._reader.connect() as connection:
            return [_api_key(row) for row in connection.execute(query).mappings()]

    def revoke_key(self, key_id: int) -> bool:
        """Stop accepting a key. False when it was unknown or revoked before."""
        keys = schema.api_keys
        statement = update(keys).where(keys.c.key_id == key_id, keys.c.revoked_at.is_(None))
        return self._writer.run(
            lambda connection: (
                connection.execute(statement.values(revoked_at=time.time())).rowcount > 0
            )
        )

    def stored_secret(self, name: str) -> bytes | None:
        """A secret that the first version kept here."""
        query = select(schema.secrets.c.value).where(schema.secrets.c.name == name)
        with self._reader.connect() as connection:
            found = connection.execute(query).scalar()
        return None if found is None else bytes(found)

    def drop_secret(self, name: str) -> None:
        statement = schema.secrets.delete().where(schema.secrets.c.name == name)
        self._writer.run(lambda connection: connection.execute(statement))


def _user(row: Any) -> User:
    fields = {name: row[name] for name in User.__slots__ if not name.startswith("key_")}
    return User(**fields | {"quotas": row["quotas"] or {}})


def _api_key(row: Any) -> ApiKey:
    return ApiKey(**{name: row[name] for name in ApiKey.__slots__})
