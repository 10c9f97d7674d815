"""`/tinkex/v1/admin/...`: everybody's sessions, runs and keys, for administrators.

Each call needs an admin key. What they do is in `server/work/oversight.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from tinkex.server.auth import CurrentAdmin
from tinkex.server.exchange import answer, serve
from tinkex.server.rest.inputs import Limit, Offset, Text, cursor, read
from tinkex.server.work.oversight import Oversight
from tinkex.store import ApiKey, UsedBy, User
from tinkex.types.account.administration import (
    AddKeyRequest,
    AddKeyResponse,
    AdminAuditEntry,
    AdminAuditResponse,
    AdminKey,
    AdminKeysResponse,
    AdminRunsResponse,
    AdminSession,
    AdminSessionsResponse,
    AdminUsageResponse,
    AdminUsersResponse,
    SetQuotasRequest,
    StopWorkRequest,
    StopWorkResponse,
)

router = APIRouter(prefix="/tinkex/v1/admin", tags=["administration"])
MAX_HOURS = 24 * 31
KeyId = Annotated[int, Path(ge=0, le=2**31 - 1)]
UserFilter = Annotated[Text | None, Query()]


def _oversight(request: Request) -> Oversight:
    found: Oversight = request.app.state.oversight
    return found


async def _end(
    request: Request,
    name: str,
    admin: User,
    end: Callable[[User, str, str], Awaitable[int]],
    of: str,
) -> Response:
    """End work as `end` does, for the reason in the request, and say how much of it there was."""
    asked: StopWorkRequest = await read(request, name)
    return answer(StopWorkResponse(num_ended=await end(admin, of, asked.reason)))


@serve(router, "admin_list_users")
async def list_users(
    request: Request,
    admin: CurrentAdmin,
    limit: Limit = 50,
    offset: Offset = 0,
    search: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """In the order of their ids; with `search` those whose id has it as a part."""
    users, total = await _oversight(request).users(limit, offset, search=search)
    return answer(AdminUsersResponse(users=users, cursor=cursor(offset, limit, total)))


@serve(router, "admin_get_user")
async def get_user(request: Request, admin: CurrentAdmin, user_id: Text) -> Response:
    oversight = _oversight(request)
    return answer(await oversight.user(await oversight.known_user(user_id)))


@serve(router, "admin_disable_user")
async def disable_user(request: Request, admin: CurrentAdmin, user_id: Text) -> Response:
    return await _end(request, "admin_disable_user", admin, _oversight(request).disable, user_id)


@serve(router, "admin_enable_user", status_code=204)
async def enable_user(request: Request, admin: CurrentAdmin, user_id: Text) -> Response:
    await _oversight(request).enable(admin, user_id)
    return Response(status_code=204)


@serve(router, "admin_stop_user")
async def stop_user(request: Request, admin: CurrentAdmin, user_id: Text) -> Response:
    return await _end(request, "admin_stop_user", admin, _oversight(request).stop_user, user_id)


@serve(router, "admin_set_quotas")
async def set_quotas(request: Request, admin: CurrentAdmin, user_id: Text) -> Response:
    asked: SetQuotasRequest = await read(request, "admin_set_quotas")
    return answer(await _oversight(request).set_quotas(admin, user_id, asked.quotas))


@serve(router, "admin_list_sessions")
async def list_sessions(
    request: Request,
    admin: CurrentAdmin,
    limit: Limit = 50,
    user_id: UserFilter = None,
    active_only: bool = True,
) -> Response:
    """Of everybody, newest first; those that are over too with `active_only=false`."""
    found = await _oversight(request).sessions(limit, user_id=user_id, active_only=active_only)
    views = [AdminSession.model_validate(x, from_attributes=True) for x in found]
    return answer(AdminSessionsResponse(sessions=views))


@serve(router, "admin_stop_session")
async def stop_session(request: Request, admin: CurrentAdmin, session_id: Text) -> Response:
    return await _end(
        request, "admin_stop_session", admin, _oversight(request).stop_session, session_id
    )


@serve(router, "admin_list_runs")
async def list_runs(
    request: Request,
    admin: CurrentAdmin,
    limit: Limit = 50,
    offset: Offset = 0,
    user_id: UserFilter = None,
    busy_only: bool = False,
) -> Response:
    """Of everybody, newest first; with `busy_only=true` those with work under way."""
    oversight = _oversight(request)
    runs, total = await oversight.runs(limit, offset, user_id=user_id, busy_only=busy_only)
    return answer(AdminRunsResponse(runs=runs, cursor=cursor(offset, limit, total)))


@serve(router, "admin_stop_run")
async def stop_run(request: Request, admin: CurrentAdmin, run_id: Text) -> Response:
    return await _end(request, "admin_stop_run", admin, _oversight(request).stop_run, run_id)


@serve(router, "admin_list_keys")
async def list_keys(request: Request, admin: CurrentAdmin, user_id: UserFilter = None) -> Response:
    found = await _oversight(request).keys(user_id)
    return answer(AdminKeysResponse(keys=[_key(key) for key in found]))


@serve(router, "admin_add_key")
async def add_key(request: Request, admin: CurrentAdmin) -> Response:
    """The answer holds the key itself, this once."""
    asked: AddKeyRequest = await read(request, "admin_add_key")
    key, made = await _oversight(request).add_key(
        admin,
        asked.user_id,
        name=asked.name,
        role=asked.role,
        requests_per_minute=asked.requests_per_minute,
    )
    return answer(AddKeyResponse(key=key, **_key(made).model_dump()))


@serve(router, "admin_revoke_key", status_code=204)
async def revoke_key(request: Request, admin: CurrentAdmin, key_id: KeyId) -> Response:
    await _oversight(request).revoke_key(admin, key_id)
    return Response(status_code=204)


@serve(router, "admin_usage")
async def usage(
    request: Request,
    admin: CurrentAdmin,
    by: UsedBy = "user",
    hours: Annotated[int, Query(ge=1, le=MAX_HOURS)] = 24,
    limit: Limit = 100,
) -> Response:
    """Of each user, key or run in the last hours, in tokens and seconds of device."""
    found = await _oversight(request).usage(by, hours, limit)
    return answer(AdminUsageResponse(usage=found))


@serve(router, "admin_audit_log")
async def audit_log(
    request: Request,
    admin: CurrentAdmin,
    limit: Limit = 100,
    offset: Offset = 0,
    user_id: UserFilter = None,
    event: Annotated[Text | None, Query()] = None,
) -> Response:
    """Newest first; of one user, or only events whose name starts with `event`."""
    entries = await _oversight(request).audit(limit, offset, user_id=user_id, event=event)
    views = [AdminAuditEntry.model_validate(x, from_attributes=True) for x in entries]
    return answer(AdminAuditResponse(entries=views))


def _key(key: ApiKey) -> AdminKey:
    return AdminKey.model_validate(key, from_attributes=True)
