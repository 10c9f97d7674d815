"""Questions about the local credential: is there one, and does the service take it?"""

from __future__ import annotations

import os

from tinkex.client.config import LOCAL, ClientConfig
from tinkex.client.credentials import load_default_key
from tinkex.client.futures import spawn
from tinkex.client.http.call import Call
from tinkex.client.session.holder import Holder
from tinkex.errors import ConfigError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The API key or token that a client would use, None without one. Never runs a command."""
    for name in ("TINKEX_API_KEY", "TINKER_API_KEY"):
        if os.environ.get(name):
            return os.environ[name]
    return load_default_key()


def tinker_has_credentials() -> bool:
    """True when a key is set or stored, or a credential command is set."""
    command = os.environ.get("TINKEX_CREDENTIAL_CMD") or os.environ.get("TINKER_CREDENTIAL_CMD")
    return bool(get_tinker_token() or command)


def raise_if_tinker_not_accessible() -> None:
    """Ask the service once, without patience.

    Raises:
        TinkerError: There is no credential, it was refused, or the service cannot be reached.
    """
    config = ClientConfig.from_env(max_retries=0)
    if config.base_url == LOCAL:
        raise ConfigError(
            "No credential is set, so there is no service to reach. Set TINKER_API_KEY."
        )
    holder = Holder(config, with_session=False)
    call = Call.to("get_server_capabilities", window=False)

    async def ask(waiting: object) -> None:
        await holder.transport.call(call)

    try:
        holder.spawn(ask).result()
    finally:
        spawn(lambda waiting: holder.close()).result()
