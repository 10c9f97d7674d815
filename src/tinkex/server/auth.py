"""Who is calling: API keys, signed tokens, and the open mode of a private server.

A credential travels in `X-API-Key`: a key (`tml-...`) that the store knows by its hash, or a token
(`eyJ...`) that this server signed. A server without any key is open: whoever reaches it is the user
`local`; the config refuses that on any address but loopback. Routes ask for `current_user` and
never see a credential. What a user may touch is decided where the thing lives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

import jwt
from fastapi import Depends, Request

from tinkex.server.problems import ApiError
from tinkex.store import ApiKey, Store, User

ISSUER = "passport-tinkex"
ORGANIZATION = "local"
TOKEN_TTL_S = 3600
OPEN_USER = "local"
CACHE_S = 5.0
"""A revoked key is refused after this long at the latest."""
CACHE_SIZE = 4096
_CONFIG_NOTE = "set in the server's configuration"
_URN = "tml:user:"


@dataclass(frozen=True, slots=True)
class _Seen:
    user: User
    until: float


class Auth:
    """Checks credentials. Make it with `Auth.open`, which reads and writes the store."""

    def __init__(self, store: Store, secret: bytes, open_user: User | None) -> None:
        self._store = store
        self._secret = secret
        self._open_user = open_user
        self._seen: dict[str, _Seen] = {}

    @classmethod
    def open(cls, store: Store, api_keys: tuple[str, ...] = ()) -> Auth:
        """Take over the configured keys (`KEY` or `KEY=USER`) and drop those configured before.

        Blocks. Without any key, configured or stored, the server is open.
        """
        configured: dict[str, str] = {}
        for entry in api_keys:
            key, _, user_id = entry.partition("=")
            configured[key] = user_id or "default"
        kept = set()
        for key, user_id in configured.items():
            store.accounts.ensure_user(user_id)
            kept.add(store.accounts.add_key(key, user_id, note=_CONFIG_NOTE).key_id)
        valid = 0
        for record in store.accounts.active_keys():
            if record.note == _CONFIG_NOTE and record.key_id not in kept:
                store.accounts.revoke_key(record.key_id)
            else:
                valid += 1
        open_user = None if valid else store.accounts.ensure_user(OPEN_USER)
        return cls(store, store.accounts.secret("jwt"), open_user)

    @property
    def is_open(self) -> bool:
        return self._open_user is not None

    async def user_of(self, credential: str | None) -> User:
        """The user behind a key or token.

        Raises:
            ApiError: 401, with a text that never repeats the credential.
        """
        credential = (credential or "").strip()
        seen = self._seen.get(credential)
        if seen is not None and seen.until > time.monotonic():
            return seen.user
        user, valid_s = await self._look_up(credential)
        if len(self._seen) >= CACHE_SIZE:
            self._seen.clear()
        self._seen[credential] = _Seen(user, time.monotonic() + min(valid_s, CACHE_S))
        return user

    async def key_of(self, credential: str | None) -> ApiKey | None:
        """The record of an API key; None for tokens and in open mode."""
        if not credential or not credential.startswith("tml-"):
            return None
        return await self._store.call(self._store.accounts.find_key, credential)

    def is_configured(self, key: ApiKey) -> bool:
        return key.note == _CONFIG_NOTE

    def forget(self) -> None:
        """Look every credential up again, because a key was revoked."""
        self._seen.clear()

    def issue_token(self, user: User) -> str:
        """A signed token for `user`, good for an hour."""
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "sub": user_urn(user.user_id),
            "org_id": ORGANIZATION,
            "email": user.email,
            "iat": now,
            "exp": now + TOKEN_TTL_S,
        }
        return jwt.encode(claims, self._secret, algorithm="HS256")

    async def _look_up(self, credential: str) -> tuple[User, float]:
        if credential.startswith("eyJ"):
            return await self._from_token(credential)
        if self._open_user is not None:
            if credential and not credential.startswith("tml-"):
                raise _refused("A key starts with 'tml-'; this server also accepts none at all.")
            return self._open_user, CACHE_S
        if not credential:
            raise _refused("No API key was sent. Set TINKER_API_KEY, or pass api_key.")
        record = await self._store.call(self._store.accounts.find_key, credential)
        if record is None:
            raise _refused("This API key is unknown here or was revoked. Check TINKER_API_KEY.")
        return await self._user(record.user_id), CACHE_S

    async def _from_token(self, token: str) -> tuple[User, float]:
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=["HS256"],
                issuer=ISSUER,
                options={"require": ["exp", "sub", "iss"]},
            )
        except jwt.ExpiredSignatureError as exc:
            raise _refused("The token has expired. Get a new one from /api/v1/auth/token.") from exc
        except jwt.InvalidTokenError as exc:
            raise _refused("The token was not signed by this server, or is damaged.") from exc
        user = await self._user(str(claims["sub"]).removeprefix(_URN))
        return user, claims["exp"] - time.time()

    async def _user(self, user_id: str) -> User:
        user = await self._store.call(self._store.accounts.get_user, user_id)
        if user is None:
            raise _refused("The user of this credential no longer exists.")
        return user


def user_urn(user_id: str) -> str:
    return f"{_URN}{user_id}"


def user_id_of_urn(urn: str) -> str:
    return urn.removeprefix(_URN)


def credential_of(request: Request) -> str | None:
    return request.headers.get("x-api-key")


async def current_user(request: Request) -> User:
    """FastAPI dependency: the caller, or a 401."""
    auth: Auth = request.app.state.auth
    return await auth.user_of(credential_of(request))


CurrentUser = Annotated[User, Depends(current_user)]
"""The type of a route's argument that wants the caller: `async def route(user: CurrentUser)`."""


def _refused(message: str) -> ApiError:
    return ApiError(401, message)
