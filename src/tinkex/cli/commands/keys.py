"""`tinkex keys ...`: who may use a server of your own.

Works on the server's database, so it needs the machine (or the database URL) the server runs with,
and no key. A running server sees a change within seconds. A key is shown once, when it is made;
what is stored is its hash. The other side, a key on a user's machine, is `tinkex auth`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.listing import Listing
from tinkex.cli.output import properties
from tinkex.cli.state import Noun, State, pass_state

if TYPE_CHECKING:
    from tinkex.store import ApiKey, Store

F = TypeVar("F", bound=Callable[..., Any])


_KEYS = Listing(
    "keys",
    "Keys",
    {
        "ID": "key_id",
        "User": "user",
        "Name": "name",
        "Role": "role",
        "Created": "created_at",
        "State": "state",
    },
)


@click.group(cls=Noun)
def keys() -> None:
    """Add, list and revoke the keys of your own server."""


def _where(command: F) -> F:
    """Add the options that name a server; they are settings of `serve`, too."""
    path = click.Path(path_type=Path)
    for option in (
        click.option("--config", "file", type=path, help="TOML file of the server."),
        click.option("--database", help="Database URL of the server, if not in its data folder."),
        click.option("--data-dir", type=path, help="Data folder of the server."),
    ):
        command = option(command)
    return command


@keys.command()
@click.option("--user", required=True, help="Who the key acts for; made when new.")
@click.option("--name", default="", help="What the key is for, shown in listings.")
@click.option("--admin", "role", flag_value="admin", help="May see and stop what all users do.")
@click.option("--metrics", "role", flag_value="metrics", help="May read /metrics, nothing else.")
@click.option(
    "--requests-per-minute",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Most requests of this key a minute, beneath its user's limit; 0: no limit of its own.",
)
@_where
@pass_state
def add(
    state: State,
    /,
    user: str,
    name: str,
    role: str | None,
    requests_per_minute: float,
    **where: Any,
) -> None:
    """Make a key for a user and show it, this once."""
    from tinkex.server.guard.auth import new_key

    if not user.strip() or user != user.strip():
        raise click.BadParameter(
            "a user needs a name without spaces around it", param_hint="--user"
        )
    key = new_key()
    with _store(where, make=True) as store:
        # A server without keys takes every caller; the first key ends that.
        is_first = not store.accounts.active_keys()
        store.accounts.ensure_user(user)
        added = store.accounts.add_key(
            key, user, name=name, role=role or "user", requests_per_minute=requests_per_minute
        )
        details = {"by": "tinkex keys", "key_id": added.key_id, "name": added.name}
        store.audit.record(user, "key_added", details | {"role": added.role})
    if is_first:
        state.note("This is the first key: callers without one are refused from now on.")
    shown = {"Key": key, "ID": added.key_id, "User": user, "Name": added.name, "Role": added.role}
    state.show(properties(None, shown), {"key": key, **_plain(added)})


@keys.command("list")
@click.option("--user", help="Only the keys of this user.")
@click.option("--all", "revoked", is_flag=True, help="Revoked keys too.")
@_where
@pass_state
def list_(state: State, /, user: str | None, revoked: bool, **where: Any) -> None:
    """List keys by number, oldest first; the keys themselves are not stored."""
    with _store(where) as store:
        listed = [
            _plain(key)
            for key in store.accounts.all_keys()
            if user in (None, key.user_id) and (revoked or key.revoked_at is None)
        ]
    state.show_items(_KEYS, listed)


@keys.command()
@click.argument("key_id", type=int)
@_where
@pass_state
def revoke(state: State, /, key_id: int, **where: Any) -> None:
    """Refuse a key, and the tokens made for it, from now on."""
    from tinkex.server.guard.auth import is_configured

    with _store(where) as store:
        key = store.accounts.get_key(key_id)
        if key is None:
            raise click.ClickException(f"No key has the number {key_id}. See `tinkex keys list`.")
        if key.revoked_at is not None:
            raise click.ClickException(
                f"Key {key_id} is revoked already. See `tinkex keys list --all`."
            )
        if is_configured(key):
            raise click.ClickException(
                f"Key {key_id} stands in the server's configuration and would be back after a "
                "restart. Remove it there and restart."
            )
        store.accounts.revoke_key(key_id)
        details = {"by": "tinkex keys", "key_id": key_id, "name": key.name}
        store.audit.record(key.user_id, "key_revoked", details)
        after = store.accounts.get_key(key_id)
        assert after is not None
        is_last = not store.accounts.active_keys()
    if is_last:
        state.note(
            "No key is left: the server refuses everybody until `tinkex keys add` makes one."
        )
    state.show(
        properties(None, {"ID": key_id, "User": after.user_id, "State": "revoked"}), _plain(after)
    )


@contextmanager
def _store(where: dict[str, Any], *, make: bool = False) -> Iterator[Store]:
    """The database of the server that is meant. Only `make` creates one."""
    from tinkex.server.process.config import load_config
    from tinkex.server.serve import connect_store
    from tinkex.store.database import sqlite_file
    from tinkex.wire.local_servers import keeper_of

    file = where.pop("file")
    config = load_config(file=file, flags=where)
    if make and not keeper_of(config.data_dir):
        # A server for others has a folder of its own, unless the key is for one that runs.
        config = load_config(file=file, flags={**where, "key_required": True})
    if not make and not config.database and not sqlite_file(config.data_dir).exists():
        raise click.ClickException(
            f"No server has kept anything in {config.data_dir} yet. Name its folder with "
            "--data-dir, or its settings with --config."
        )
    store = connect_store(config)
    try:
        yield store
    finally:
        store.close()


def _plain(key: ApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "user": key.user_id,
        "name": key.name,
        "role": key.role,
        "requests_per_minute": key.requests_per_minute,
        "state": _state(key),
        "created_at": _time(key.created_at),
        "revoked_at": _time(key.revoked_at),
    }


def _state(key: ApiKey) -> str:
    from tinkex.server.guard.auth import is_configured

    if key.revoked_at is not None:
        return "revoked"
    return "configured" if is_configured(key) else "active"


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
