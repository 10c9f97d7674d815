"""Users and their API keys.

A key is stored only as its SHA-256: keys are long and random, so a slow hash would add nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, insert, select, update

from tinkex.store import schema
from tinkex.store.noun import StoredNoun
from tinkex.store.records import ApiKey, User
from tinkex.store.upsert import insert_or_ignore

_users = schema.users
_keys = schema.api_keys


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Accounts(StoredNoun):
    def ensure_user(self, user_id: str, *, name: str = "") -> User:
        """The user of that id, made when absent; an existing one keeps its name."""
        row: dict[str, Any] = {"user_id": user_id, "name": name or user_id, "email": ""}
        row["created_at"] = time.time()

        def write(connection: Connection) -> None:
            connection.execute(insert_or_ignore(connection, _users), row)

        self._writer.run(write)
        user = self.get_user(user_id)
        assert user is not None
        return user

    def get_user(self, user_id: str) -> User | None:
        user = self._first(User, select(_users).where(_users.c.user_id == user_id))
        return None if user is None else _with_quotas(user)

    def users(self, limit: int, offset: int = 0, *, search: str = "") -> tuple[list[User], int]:
        """A page of all users in the order of their ids, and how many there are.

        With `search` only those whose id has it as a part, in whatever case.
        """
        where = [_users.c.user_id.icontains(search, autoescape=True)] if search else []
        users, total = self._page(User, _users, where, [_users.c.user_id], limit, offset)
        return [_with_quotas(user) for user in users], total

    def with_quotas(self, limit: int) -> list[User]:
        """Users whose limits differ from the server's."""
        query = select(_users).where(_users.c.quotas.is_not(None)).limit(limit)
        return [user for user in map(_with_quotas, self._all(User, query)) if user.quotas]

    def disable(self, user_id: str, at: float | None) -> None:
        """Refuse a user from a moment on; None lets it in again."""
        self._write(update(_users).where(_users.c.user_id == user_id).values(disabled_at=at))

    def set_quotas(self, user_id: str, quotas: dict[str, float]) -> None:
        """The limits of a user that differ from the server's, all of them."""
        self._write(update(_users).where(_users.c.user_id == user_id).values(quotas=quotas))

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

        def write(connection: Connection) -> None:
            known = connection.execute(
                update(_keys)
                .where(_keys.c.key_hash == row["key_hash"])
                .values(user_id=user_id, note=note, revoked_at=None, role=role)
            )
            if known.rowcount == 0:
                connection.execute(insert(_keys), row)

        self._writer.run(write)
        known_key = self.find_key(key)
        assert known_key is not None
        return known_key

    def find_key(self, key: str) -> ApiKey | None:
        """The record of a key that is not revoked."""
        is_key = (_keys.c.key_hash == hash_key(key), _keys.c.revoked_at.is_(None))
        return self._first(ApiKey, select(_keys).where(*is_key))

    def get_key(self, key_id: int) -> ApiKey | None:
        """The record of a key, revoked or not."""
        return self._first(ApiKey, select(_keys).where(_keys.c.key_id == key_id))

    def keys(self, user_ids: Sequence[str]) -> list[ApiKey]:
        """Every key of some users, revoked ones too, in the order they were added."""
        return self._some_keys(_keys.c.user_id.in_(user_ids))

    def all_keys(self) -> list[ApiKey]:
        """Every key of all users, revoked ones too, in the order they were added."""
        return self._some_keys()

    def keys_numbered(self, key_ids: Sequence[int]) -> list[ApiKey]:
        """Some keys, revoked or not."""
        return self._some_keys(_keys.c.key_id.in_(key_ids))

    def active_keys(self) -> list[ApiKey]:
        """Every key that is not revoked, of all users."""
        return self._some_keys(_keys.c.revoked_at.is_(None))

    def newest_keys(self, limit: int, *, search: str = "") -> tuple[list[ApiKey], int]:
        """The keys that are not revoked, newest first, and how many there are.

        With `search` only those of users whose id has it as a part.
        """
        where: list[Any] = [_keys.c.revoked_at.is_(None)]
        where += [_keys.c.user_id.icontains(search, autoescape=True)] if search else []
        return self._page(ApiKey, _keys, where, [_keys.c.key_id.desc()], limit)

    def _some_keys(self, *where: Any) -> list[ApiKey]:
        return self._all(ApiKey, select(_keys).where(*where).order_by(_keys.c.key_id))

    def revoke_key(self, key_id: int) -> bool:
        """Stop accepting a key. False when it was unknown or revoked before."""
        statement = update(_keys).where(_keys.c.key_id == key_id, _keys.c.revoked_at.is_(None))
        return self._write(statement.values(revoked_at=time.time())) > 0

    def stored_secret(self, name: str) -> bytes | None:
        """A secret that the first version kept here."""
        query = select(schema.secrets.c.value).where(schema.secrets.c.name == name)
        return next(map(bytes, self._scalars(query)), None)

    def drop_secret(self, name: str) -> None:
        self._write(schema.secrets.delete().where(schema.secrets.c.name == name))


def _with_quotas(user: User) -> User:
    """Rows of before have none, which is no limit of their own."""
    return replace(user, quotas=user.quotas or {})
