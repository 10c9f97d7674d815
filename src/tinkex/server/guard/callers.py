"""Who calls a foreign API's endpoint: its clients send keys in other headers than ours."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from tinkex.server.guard.auth import Auth
from tinkex.store import User

PREFIXES = ("/v1", "/oai/api/v1")
"""Of the paths of foreign APIs: OpenAI's own, and the one of the hosted service."""
_BELOW = tuple(f"{prefix}/" for prefix in PREFIXES)


def is_foreign(path: str) -> bool:
    return path.startswith(_BELOW)


def foreign_credential(request: Request) -> str | None:
    """The key in `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key")


async def foreign_user(request: Request) -> User:
    """FastAPI dependency: the caller, or a 401.

    These clients cannot be made without a key, so an open server takes whatever they send.
    """
    auth: Auth = request.app.state.auth
    return await auth.user_of(_taken(request, auth))


async def foreign_sees_users(request: Request) -> bool:
    """Whether the caller's key, which may be one for `/metrics` alone, is told of all users."""
    auth: Auth = request.app.state.auth
    return await auth.sees_users(_taken(request, auth))


def _taken(request: Request, auth: Auth) -> str | None:
    credential = foreign_credential(request)
    if auth.is_open and credential and not credential.startswith(("tml-", "eyJ")):
        return None
    return credential


ForeignUser = Annotated[User, Depends(foreign_user)]
