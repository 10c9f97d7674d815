"""Where a credential comes from, and how it is kept fresh.

The stored file (`~/.tinker/credentials.json`), the credential command, and the exchange of either
for a short-lived token. Nothing here logs, prints or puts a credential into an error; who may do
what with one is the server's business.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError, TinkerError

# Both margins are the official SDK's (contract 1.7).
_REFRESH_AHEAD_S = 300.0
_USABLE_S = 60.0
_COMMAND_TIMEOUT_S = 60.0


def mask(secret: str | None) -> str | None:
    """`tml-abc...` -> `tml-***`: enough to tell kinds of keys apart, never the key."""
    if not secret:
        return None
    return f"{secret[:4]}***" if secret.startswith(("tml-", "eyJ")) else "***"


# ------------------------------------------------------------------------------- stored file


def credentials_path(env: Mapping[str, str] | None = None) -> Path:
    env = os.environ if env is None else env
    home = env.get("HOME") or env.get("USERPROFILE")
    return Path(home or Path.home()) / ".tinker" / "credentials.json"


def load_credentials(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The stored file as it is, `{"version": 1, "keys": {}}` when there is none."""
    path = credentials_path(env)
    try:
        stored = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {"version": 1, "keys": {}}
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{path} cannot be read as JSON ({type(exc).__name__}). Repair or delete it, then run "
            "`tinkex auth login`."
        ) from exc
    if not isinstance(stored, dict) or not isinstance(stored.get("keys", {}), dict):
        raise ConfigError(f"{path} does not hold an object with 'keys'. Repair or delete it.")
    return stored


def load_default_key(env: Mapping[str, str] | None = None) -> str | None:
    """The key that `tinkex auth login` stored as default, if there is one."""
    stored = load_credentials(env)
    entry = stored.get("keys", {}).get(str(stored.get("default")))
    key = entry.get("key") if isinstance(entry, dict) else None
    return key if isinstance(key, str) and key else None


def store_default_key(
    key_id: str, entry: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> Path:
    """Store one key (`{"type", "key", "name", ...}`) and make it the default."""
    stored = load_credentials(env)
    stored.setdefault("version", 1)
    stored.setdefault("keys", {})[key_id] = dict(entry)
    stored["default"] = key_id
    return _write(stored, env)


def delete_default_key(env: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Forget the default key; returns its entry, None when there was none."""
    stored = load_credentials(env)
    key_id = str(stored.pop("default", ""))
    entry: dict[str, Any] | None = stored.get("keys", {}).pop(key_id, None)
    if entry is not None:
        _write(stored, env)
    return entry


def _write(stored: dict[str, Any], env: Mapping[str, str] | None) -> Path:
    path = credentials_path(env)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".credentials-")
    try:
        os.fchmod(descriptor, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(stored, file, indent=2)
        # The official SDK reads this file as well, and must never find half of it (contract 12.2).
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    return path


# ------------------------------------------------------------------------------- the command


def run_credential_command(command: str) -> str:
    """Run the shell command and return its trimmed output. Blocks."""
    try:
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"TINKER_CREDENTIAL_CMD did not end within {_COMMAND_TIMEOUT_S:.0f} s. Run it by hand."
        ) from None
    credential = done.stdout.strip()
    if done.returncode != 0 or not credential:
        raise ConfigError(
            f"TINKER_CREDENTIAL_CMD ended with status {done.returncode} and "
            f"{'no output' if not credential else 'some output'}. Run it by hand to see why."
        )
    return credential


# ------------------------------------------------------------------------------- tokens


def jwt_claims(token: str) -> dict[str, Any]:
    """The claims of a JWT, decoded and not verified; `{}` when it is not readable."""
    try:
        payload = token.split(".")[1]
        decoded = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


class TokenProvider:
    """The value of `X-API-Key`: the credential itself, or a token exchanged for it.

    All methods run on one event loop. `exchange` posts the credential and returns a token; it is
    None while tokens are off.
    """

    def __init__(
        self,
        api_key: str | None,
        credential_cmd: str | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api_key = api_key
        self._command = credential_cmd
        self._clock = clock
        self._exchange: Callable[[str], Awaitable[str]] | None = None
        self._token: str | None = None
        self._expires_s = 0.0
        """When the token ends; read once, because every request asks."""
        self._lock = asyncio.Lock()

    def use_exchange(self, exchange: Callable[[str], Awaitable[str]]) -> None:
        """From now on, hand out exchanged tokens. A JWT given directly is used as it is."""
        if not (self._api_key or "").startswith("eyJ"):
            self._exchange = exchange

    def require_command(self) -> None:
        """The server takes only credentials that the command prints."""
        if (self._api_key or "").startswith("eyJ"):
            return
        if self._command is None:
            raise ConfigError(
                "This server demands a credential command, and none is set. Set "
                "TINKER_CREDENTIAL_CMD to a command that prints a credential."
            )
        self._api_key = None

    @property
    def token_claims(self) -> dict[str, Any]:
        return jwt_claims(self._token or self._api_key or "")

    async def credential(self) -> str:
        """The raw credential; runs the command when there is no key."""
        if self._api_key is not None:
            return self._api_key
        if self._command is None:
            raise ConfigError("No credential. Set TINKER_API_KEY or TINKER_CREDENTIAL_CMD.")
        return await asyncio.to_thread(run_credential_command, self._command)

    async def token(self) -> str:
        """The token to send now; one that is about to end is refreshed first."""
        if self._exchange is None:
            return await self.credential()
        if self._remaining_s() <= _USABLE_S:
            async with self._lock:
                if self._remaining_s() <= _USABLE_S:  # else another call has refreshed it meanwhile
                    try:
                        await self.refresh()
                    except TinkerError:
                        if self._token is None:  # an old one may still do
                            raise
        assert self._token is not None
        return self._token

    async def refresh(self) -> None:
        assert self._exchange is not None
        self._token = await self._exchange(await self.credential())
        expiry = self.token_claims.get("exp")
        self._expires_s = float(expiry) if isinstance(expiry, (int, float)) else 0.0

    async def keep_fresh(self) -> None:
        """Refresh well before the end, for ever. Runs as a background task of the holder."""
        while self._exchange is not None:
            remaining_s = self._remaining_s()
            # A token that lives shorter than the margin is renewed at half its life.
            await asyncio.sleep(max(remaining_s - _REFRESH_AHEAD_S, remaining_s / 2, 5.0))
            if self._token is None:
                await asyncio.sleep(_USABLE_S)
                continue
            try:
                await self.refresh()
            except TinkerError:
                await asyncio.sleep(_USABLE_S)

    def _remaining_s(self) -> float:
        return self._expires_s - self._clock()
