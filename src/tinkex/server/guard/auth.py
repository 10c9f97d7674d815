"""Who is calling: API keys, signed tokens, and the open mode of a private server.

A credential travels in `X-API-Key`: a key (`tml-...`) that the store knows by its hash, or a token
(`eyJ...`) that this server signed. A token names the key it was exchanged for and dies with it. A
server without any key is open: whoever reaches it is the user `local`; it is refused on any address
but loopback, and ends when a key is added, for as long as the process lives. Keys are read from the
store, so that `tinkex keys` works on a running server. Routes ask for `current_user` and never see
a credential: the door (`server/door.py`) asks once and notes the caller's `Identity`. What a user
may touch is decided where the thing lives; what an admin key may do besides, where a route asks for
`current_admin`. A key of the role `metrics` is good for `/metrics` and refused everywhere else. A
user that an administrator disabled is refused.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jwt
from fastapi import Depends, Request

from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.process.problems import ApiError
from tinkex.store import ApiKey, Store, User

logger = logging.getLogger(__name__)
ISSUER = "passport-tinkex"
ORGANIZATION = "local"
TOKEN_TTL_S = 3600
OPEN_USER = "local"
CACHE_S = 5.0
"""A revoked key is refused after this long at the latest, and so are the tokens it was given."""
CACHE_SIZE = 4096
MAX_CREDENTIAL = 4096
MAX_ENDED_OF_USER = 1000
"""Ended logins of one user that are remembered, across a restart too."""
LOGOUT = "logout"
"""The audit log's event of a login that its user ended."""
_CONFIG_NOTE = "set in the server's configuration"
_URN = "tml:user:"
_KEY_CLAIM = "key_id"
CALLER = "tinkex.caller"
"""In a request's scope: the `Identity` of the caller, once the door has let them in."""
USER_ID = "tinkex.user"
"""The user whose room, turns and rates a request takes: the caller, a visitor, who made a link."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user behind a credential, and what the credential is good for."""

    user: User
    key_id: int | None
    """None: nobody's key, because the server is open."""
    role: str
    valid_s: float = CACHE_S

    @property
    def sees_users(self) -> bool:
        """Whether `/metrics` tells what each user does."""
        return self.role in ("admin", "metrics")

    def require_admin(self) -> User:
        """The user, whose key is an admin's.

        Raises:
            ApiError: 403 for a key of an ordinary user.
        """
        if self.role != "admin":
            raise ApiError(
                403,
                "This needs an admin key. Whoever runs the server makes one with "
                "`tinkex keys add --user NAME --admin`.",
            )
        return self.user


@dataclass(frozen=True, slots=True)
class _Seen:
    identity: Identity
    until: float


class Auth:
    """Checks credentials. Make it with `Auth.open`, which reads and writes the store."""

    def __init__(self, store: Store, secret: bytes, open_user: User | None) -> None:
        self._store = store
        self._secret = secret
        self._open_user = open_user
        self._seen: dict[str, _Seen] = {}
        # Tokens by digest that were logged out: until when, and whose.
        self._ended: dict[str, tuple[float, str]] = {}

    @classmethod
    def open(
        cls,
        store: Store,
        api_keys: tuple[str, ...] = (),
        *,
        secret: bytes,
        key_required: bool = False,
    ) -> Auth:
        """Take over the configured keys (`KEY` or `KEY=USER`) and drop those configured before.

        Blocks. Without any key the server is open; once `tinkex keys` made one, it stays closed,
        even when the last one is revoked.
        """
        configured: dict[str, str] = {}
        for entry in api_keys:
            key, _, user_id = entry.partition("=")
            configured[key] = user_id or "default"
        kept = set()
        for key, user_id in configured.items():
            store.accounts.ensure_user(user_id)
            kept.add(store.accounts.add_key(key, user_id, note=_CONFIG_NOTE).key_id)
        known = store.accounts.all_keys()
        for record in known:
            if is_configured(record) and record.key_id not in kept and record.revoked_at is None:
                store.accounts.revoke_key(record.key_id)
        is_closed = key_required or kept or any(not is_configured(record) for record in known)
        if is_closed and not store.accounts.active_keys():
            logger.warning("no key is valid: all are refused until `tinkex keys add` makes one")
        open_user = None if is_closed else store.accounts.ensure_user(OPEN_USER)
        auth = cls(store, secret, open_user)
        auth._remember_logouts()
        return auth

    @property
    def is_open(self) -> bool:
        return self._open_user is not None

    async def identity_of(self, credential: str | None, *, for_metrics: bool = False) -> Identity:
        """The identity behind a key or token; one of the role `metrics` only where that is enough.

        Raises:
            ApiError: 401, with a text that never repeats the credential; 403 for a metrics key.
        """
        seen = self._seen.get(credential or "")  # the short way of most requests
        if seen is None or seen.until <= time.monotonic():
            identity = await self._any_identity(credential)
        else:
            identity = seen.identity
        if identity.role == "metrics" and not for_metrics:
            raise ApiError(403, "This key may read /metrics and nothing else. Use another key.")
        return identity

    async def user_of(self, credential: str | None) -> User:
        """The user behind a key or token; raises as `identity_of` does."""
        return (await self.identity_of(credential)).user

    async def is_admin(self, credential: str | None) -> bool:
        """Whether a valid credential is an admin key, or a token made for one."""
        return (await self.identity_of(credential)).role == "admin"

    async def admin_of(self, credential: str | None) -> User:
        """The user behind an admin key.

        Raises:
            ApiError: 401 for no valid key, 403 for one of an ordinary user.
        """
        return (await self.identity_of(credential)).require_admin()

    async def _any_identity(self, credential: str | None) -> Identity:
        credential = (credential or "").strip()
        if len(credential) > MAX_CREDENTIAL:
            raise _refused(f"A key or token has at most {MAX_CREDENTIAL} characters.")
        seen = self._seen.get(credential)
        if seen is not None and seen.until > time.monotonic():
            return seen.identity
        # A refusal raises and is not remembered: whoever tries keys cannot fill the cache.
        identity = await self._look_up(credential)
        if len(self._seen) >= CACHE_SIZE:
            self._seen.clear()
        self._seen[credential] = _Seen(identity, time.monotonic() + min(identity.valid_s, CACHE_S))
        return identity

    async def grantor(self, credential: str | None) -> tuple[str, int | None]:
        """(user, key) behind a credential, for what is given away in their name."""
        identity = await self.identity_of(credential)
        return identity.user.user_id, identity.key_id

    async def key_of(self, credential: str | None) -> ApiKey | None:
        """The record of an API key; None for tokens and in open mode."""
        if not credential or not credential.startswith("tml-"):
            return None
        return await self._store.call(self._store.accounts.find_key, credential)

    def forget(self) -> None:
        """Look every credential up again, because a key was revoked."""
        self._seen.clear()

    async def issue_token(self, credential: str | None) -> str:
        """A signed token that acts for a key, good for an hour or until the key is revoked."""
        identity = await self.identity_of(credential)
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "sub": user_urn(identity.user.user_id),
            "org_id": ORGANIZATION,
            "email": identity.user.email,
            "iat": now,
            "exp": now + TOKEN_TTL_S,
            "jti": secrets.token_hex(8),  # two logins of one second end each by itself
            _KEY_CLAIM: identity.key_id,
        }
        return jwt.encode(claims, self._secret, algorithm="HS256")

    def _remember_logouts(self) -> None:
        start = time.time() - TOKEN_TTL_S
        for entry in self._store.audit.newest_of_users(LOGOUT, MAX_ENDED_OF_USER, start=start):
            until = entry.timestamp + TOKEN_TTL_S
            self._ended[str(entry.details.get("token"))] = until, entry.user_id

    async def end_token(self, token: str) -> None:
        """Refuse a token from now on, because its visitor logged out; a restart remembers it."""
        user = await self.user_of(token)
        now, digest = time.time(), _digest(token)
        self._ended = {one: ended for one, ended in self._ended.items() if ended[0] > now}
        # By user: who logs out again and again must not let in another's ended token.
        mine = [one for one, (_, owner) in self._ended.items() if owner == user.user_id]
        for oldest in mine[: max(0, len(mine) + 1 - MAX_ENDED_OF_USER)]:
            del self._ended[oldest]
        self._ended[digest] = now + TOKEN_TTL_S, user.user_id
        self._seen.pop(token, None)
        self._store.audit.record(user.user_id, LOGOUT, {"token": digest})

    async def reader_of(self, token: str, failed_logins: FailedLogins, guesser: User) -> User:
        """The user whose token another one shows, to read what is theirs.

        Raises:
            ApiError: 401; 429 for who tries one after the other, as at the login.
        """
        try:
            return await self.user_of(token)
        except ApiError as exc:
            raise failed_logins.put_off(exc, f"user {guesser.user_id}") from exc

    async def _still_open(self) -> User | None:
        """The user of an open server. Once it has a key it stays closed, whatever is revoked."""
        if self._open_user is not None:
            if await self._store.call(self._store.accounts.active_keys):
                logger.warning("a key was added: callers without one are refused from now on")
                self._open_user = None
        return self._open_user

    async def _look_up(self, credential: str) -> Identity:
        open_user = await self._still_open()
        if is_token(credential):
            return await self._from_token(credential)
        if open_user is not None:
            if credential and not credential.startswith("tml-"):
                raise _refused("A key starts with 'tml-'; this server also accepts none at all.")
            return Identity(open_user, None, role="admin")
        if not credential:
            raise _refused("No API key was sent. Set TINKER_API_KEY, or pass api_key.")
        record = await self._store.call(self._store.accounts.find_key, credential)
        if record is None:
            raise _refused("This API key is unknown here or was revoked. Check TINKER_API_KEY.")
        return await self._identified(record, CACHE_S)

    async def _from_token(self, token: str) -> Identity:
        if self._ended and _digest(token) in self._ended:
            raise _refused("This login was ended by its user. Log in again.")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._secret,
                # Not the algorithm that the token names, which may be `none`.
                algorithms=["HS256"],
                issuer=ISSUER,
                options={"require": ["exp", "sub", "iss"]},
            )
        except jwt.ExpiredSignatureError as exc:
            raise _refused("The token has expired. Get a new one from /api/v1/auth/token.") from exc
        except jwt.InvalidTokenError as exc:
            raise _refused("The token was not signed by this server, or is damaged.") from exc
        user_id, key_id = str(claims["sub"]).removeprefix(_URN), claims.get(_KEY_CLAIM)
        left_s = claims["exp"] - time.time()
        if key_id is None and self._open_user is not None:  # made by this server while it is open
            return Identity(await self._user(user_id), None, "admin", left_s)
        record = None if key_id is None else await self._standing(key_id, user_id)
        if record is None:
            raise _refused("The key this token was made for is revoked. Use another key.")
        return await self._identified(record, left_s)

    async def _identified(self, key: ApiKey, valid_s: float) -> Identity:
        user = replace(
            await self._user(key.user_id),
            key_id=key.key_id,
            key_requests_per_minute=key.requests_per_minute,
        )
        return Identity(user, key.key_id, key.role, valid_s)

    async def may_act(self, key_id: int | None, user_id: str) -> bool:
        """Whether what was given away in the name of a key is still good."""
        user = await self._store.call(self._store.accounts.get_user, user_id)
        if user is None or user.disabled_at is not None:
            return False
        if key_id is None:  # made by an open server
            return self._open_user is not None
        return await self._standing(key_id, user_id) is not None

    async def _standing(self, key_id: int, user_id: str) -> ApiKey | None:
        """The key that something was made for; None when it is no longer good."""
        key = await self._store.call(self._store.accounts.get_key, key_id)
        if key is None or key.revoked_at is not None or key.user_id != user_id:
            return None
        return key

    async def _user(self, user_id: str) -> User:
        user = await self._store.call(self._store.accounts.get_user, user_id)
        if user is None:
            raise _refused("The user of this credential no longer exists.")
        if user.disabled_at is not None:
            raise ApiError(
                403,
                f"The user {user_id!r} was disabled by an administrator of this server. What it "
                "stored is kept; ask them to enable it.",
                code="user_disabled",
            )
        return user


def new_key() -> str:
    return f"tml-{secrets.token_urlsafe(32)}"


def is_configured(key: ApiKey) -> bool:
    """Whether a key stands in the server's configuration: revoked, it would be back at a start."""
    return key.note == _CONFIG_NOTE


def is_token(credential: str) -> bool:
    """Whether a credential looks like a signed token, which ends within the hour, and not a key."""
    return credential.startswith("eyJ")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def user_urn(user_id: str) -> str:
    return f"{_URN}{user_id}"


def user_id_of_urn(urn: str) -> str:
    return urn.removeprefix(_URN)


def credential_of(request: Request) -> str | None:
    return request.headers.get("x-api-key")


def address_of(request: Request) -> str:
    return request.client.host if request.client else ""


async def current_user(request: Request) -> User:
    """FastAPI dependency: the caller that the door let in."""
    caller: Identity = request.scope[CALLER]
    return caller.user


async def current_admin(request: Request) -> User:
    """FastAPI dependency: the caller, whose key is an admin's, or a 403."""
    caller: Identity = request.scope[CALLER]
    return caller.require_admin()


CurrentAdmin = Annotated[User, Depends(current_admin)]
CurrentUser = Annotated[User, Depends(current_user)]
"""The type of a route's argument that wants the caller: `async def route(user: CurrentUser)`."""


def _refused(message: str) -> ApiError:
    return ApiError(401, message)
