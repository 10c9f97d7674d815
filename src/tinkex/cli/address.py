"""The server a command talks to, as a plain URL and key, for commands that speak raw HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from tinkex.cli.state import State


@contextlib.contextmanager
def resolve_address(state: State) -> Iterator[tuple[str, str]]:
    """(base URL, key) of the configured server; the embedded one is started and left again."""
    from tinkex.client.config import LOCAL, ClientConfig
    from tinkex.client.session.credentials import run_credential_command

    config = ClientConfig.from_env(base_url=state.base_url)
    key = config.api_key or run_credential_command(config.credential_cmd or "")
    if config.base_url != LOCAL:
        yield config.base_url, key
        return
    from tinkex.client.session.embedded_server import join_local_server

    server = join_local_server()
    try:
        yield server.base_url, server.api_key
    finally:
        asyncio.run(server.leave())
