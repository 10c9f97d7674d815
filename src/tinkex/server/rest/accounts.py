"""`/auth/...`: exchange a key for a signed token, look at a key, give a key back."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tinkex import types
from tinkex.server.guard.auth import (
    ORGANIZATION,
    CurrentUser,
    address_of,
    credential_of,
    is_configured,
)
from tinkex.server.http.dependencies import dependencies_of
from tinkex.server.http.handlers import answer, serve
from tinkex.server.process.problems import ApiError

router = APIRouter(prefix="/api/v1/auth", tags=["accounts"])


@serve(router, "exchange_token")
async def exchange_token(request: Request, user: CurrentUser) -> Response:
    parts = dependencies_of(request)
    token = await parts.auth.issue_token(credential_of(request))
    parts.administration.note_login(user.user_id, address_of(request), by="token")
    return answer(types.AuthTokenResponse(jwt=token))


@serve(router, "describe_key")
async def describe_key(request: Request, user: CurrentUser) -> Response:
    record = await dependencies_of(request).auth.key_of(credential_of(request))
    email = user.email or f"{user.user_id}@localhost"
    details = types.ApiKeyDetails(
        org_details=types.OrgDetails(name=ORGANIZATION),
        user_details=types.UserDetails(email=email),
    )
    return answer(
        types.ApiKeyResponse(
            key_id=record.key_id if record else 0,
            name=record.name if record else "no key needed",
            note=record.note if record else "this server is open to its own machine",
            details=details,
        )
    )


@serve(router, "revoke_key", status_code=204)
async def revoke_key(request: Request, user: CurrentUser) -> Response:
    auth, store = dependencies_of(request).auth, dependencies_of(request).store
    record = await auth.key_of(credential_of(request))
    if record is None:
        raise ApiError(403, "There is no key to revoke: this server is open, or a token was sent.")
    if is_configured(record):
        raise ApiError(
            403,
            "This key stands in the server's configuration and would be back after a restart. "
            "Remove it there.",
        )
    await store.call(store.accounts.revoke_key, record.key_id)
    store.audit.record(user.user_id, "key_revoked", {"key_id": record.key_id, "name": record.name})
    # After the row: a request in between would have the key remembered as valid once more.
    auth.forget()
    return Response(status_code=204)
