"""Put the REST routes and what they need on an application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI

from tinkex.server.auth import Auth
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.files.depot import Depot
from tinkex.server.files.private import secret
from tinkex.server.files.signing import Signer
from tinkex.server.rest import (
    accounts,
    administration,
    audit,
    checkpoints,
    files,
    imports,
    runs,
    sessions,
)
from tinkex.store import Store

MODULES = (accounts, runs, checkpoints, imports, sessions, audit, administration, files)


def install(
    app: FastAPI,
    store: Store,
    data_dir: Path,
    api_keys: tuple[str, ...] = (),
    on_session_finished: Callable[[str], Awaitable[None]] | None = None,
    *,
    key_required: bool = False,
    depot: Depot | None = None,
) -> None:
    """Mount the routes; sets `store`, `auth`, `shelf` and `signer` on `app.state`. Blocks shortly.

    `on_session_finished` is awaited once per session that its client ends.
    """
    app.state.store = store
    token_secret = secret(store, data_dir, "jwt")
    app.state.auth = Auth.open(store, api_keys, secret=token_secret, key_required=key_required)
    app.state.shelf = Shelf(store, data_dir, depot)
    app.state.signer = Signer(secret(store, data_dir, "links"))
    app.state.on_session_finished = on_session_finished
    app.state.copy_locks = {}
    for module in MODULES:
        app.include_router(module.router)
