"""The data folder of a server that names none.

A server for one person on their own machine has the folder of their private server: what was
trained without `tinkex serve` is there with it, and the other way round. One for others has a
folder of its own, and so has one that was started before with `~/.tinkex/server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.wire.local_servers import private_data_folder, state_folder

DATABASE = "tinkex.db"
_FOR_OTHERS = ("api_keys", "api_key_file", "key_required", "database", "storage", "public_url")
_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")


def default_data_dir(values: Mapping[str, Any], env: Mapping[str, str]) -> Path:
    """The folder for a server with these settings: the private server's, or `~/.tinkex/server`."""
    own = state_folder(env) / "server"
    models = values.get("models") or (DEFAULT_MODEL,)
    is_for_others = (
        any(values.get(name) for name in _FOR_OTHERS)
        or values.get("host", "") not in _LOOPBACK
        or DEFAULT_MODEL not in models  # programs that ask for it start a private server beside it
    )
    if is_for_others or (own / DATABASE).exists():
        return own
    engine = values.get("engine") or "torch"
    local_engine = "" if engine == "torch" else str(engine)
    return private_data_folder({**env, "TINKEX_LOCAL_ENGINE": local_engine})
