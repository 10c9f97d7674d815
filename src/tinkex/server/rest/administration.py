"""`/tinkex/v1/admin/...`: everybody's sessions, runs and keys, for administrators.

Each call needs an admin key. What they do is in `server/administration/administration.py`.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from tinkex.server.administration.administration import Administration
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import Limit, Offset, Text, cursor
from tinkex.server.rest.views import deletion_view
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
    AdminUser,
    AdminUsersResponse,
    DeleteRunResponse,
    SetQuotasRequest,
    StopWorkRequest,
    StopWorkResponse,
)

router = APIRouter(prefix="/tinkex/v1/admin", tags=["administration"])
MAX_HOURS = 24 * 31
# The column is an Integer, which has 32 bits in PostgreSQL.
KeyId = Annotated[int, Path(ge=0, le=2**31 - 1)]
UserFilter = Annotated[Text | None, Query()]


@serve(router, "admin_list_users")
async def list_users(
    administration: Administration,
    admin: User,
    limit: Limit = 50,
    offset: Offset = 0,
    search: Annotated[str, Query(max_length=200)] = "",
) -> AdminUsersResponse:
    """In the order of their ids; with `search` those whose id has it as a part."""
    users, total = await administration.users(limit, offset, search=search)
    return AdminUsersResponse(users=users, cursor=cursor(offset, limit, total))


@serve(router, "admin_get_user")
async def get_user(administration: Administration, admin: User, user_id: Text) -> AdminUser:
    return await administration.user(await administration.known_user(user_id))


@serve(router, "admin_disable_user")
async def disable_user(
    administration: Administration, admin: User, user_id: Text, asked: StopWorkRequest
) -> StopWorkResponse:
    return StopWorkResponse(num_ended=await administration.disable(admin, user_id, asked.reason))


@serve(router, "admin_enable_user")
async def enable_user(administration: Administration, admin: User, user_id: Text) -> None:
    await administration.enable(admin, user_id)


@serve(router, "admin_lift_pause")
async def lift_pause(administration: Administration, admin: User, user_id: Text) -> None:
    """Run the work again of a user who waits because it ended workers, and start counting anew."""
    await administration.lift_pause(admin, user_id)


@serve(router, "admin_stop_user")
async def stop_user(
    administration: Administration, admin: User, user_id: Text, asked: StopWorkRequest
) -> StopWorkResponse:
    return StopWorkResponse(num_ended=await administration.stop_user(admin, user_id, asked.reason))


@serve(router, "admin_set_quotas")
async def set_quotas(
    administration: Administration, admin: User, user_id: Text, asked: SetQuotasRequest
) -> AdminUser:
    return await administration.set_quotas(admin, user_id, asked.quotas)


@serve(router, "admin_list_sessions")
async def list_sessions(
    administration: Administration,
    admin: User,
    limit: Limit = 50,
    user_id: UserFilter = None,
    active_only: bool = True,
) -> AdminSessionsResponse:
    """Of everybody, newest first; those that are over too with `active_only=false`."""
    sessions = await administration.sessions(limit, user_id=user_id, active_only=active_only)
    views = [AdminSession.model_validate(x, from_attributes=True) for x in sessions]
    return AdminSessionsResponse(sessions=views)


@serve(router, "admin_stop_session")
async def stop_session(
    administration: Administration, admin: User, session_id: Text, asked: StopWorkRequest
) -> StopWorkResponse:
    return StopWorkResponse(
        num_ended=await administration.stop_session(admin, session_id, asked.reason)
    )


@serve(router, "admin_list_runs")
async def list_runs(
    administration: Administration,
    admin: User,
    limit: Limit = 50,
    offset: Offset = 0,
    user_id: UserFilter = None,
    busy_only: bool = False,
) -> AdminRunsResponse:
    """Of everybody, newest first; with `busy_only=true` those with work under way."""
    runs, total = await administration.runs(limit, offset, user_id=user_id, busy_only=busy_only)
    return AdminRunsResponse(runs=runs, cursor=cursor(offset, limit, total))


@serve(router, "admin_stop_run")
async def stop_run(
    administration: Administration, admin: User, run_id: Text, asked: StopWorkRequest
) -> StopWorkResponse:
    return StopWorkResponse(num_ended=await administration.stop_run(admin, run_id, asked.reason))


@serve(router, "admin_delete_run")
async def delete_run(
    administration: Administration, admin: User, run_id: Text
) -> DeleteRunResponse:
    return deletion_view(await administration.delete_run(admin, run_id))


@serve(router, "admin_list_keys")
async def list_keys(
    administration: Administration, admin: User, user_id: UserFilter = None
) -> AdminKeysResponse:
    return AdminKeysResponse(keys=[_key(key) for key in await administration.keys(user_id)])


@serve(router, "admin_add_key")
async def add_key(
    administration: Administration, admin: User, asked: AddKeyRequest
) -> AddKeyResponse:
    """The answer holds the key itself, this once."""
    key, made = await administration.add_key(
        admin,
        asked.user_id,
        name=asked.name,
        role=asked.role,
        requests_per_minute=asked.requests_per_minute,
    )
    return AddKeyResponse(key=key, **_key(made).model_dump())


@serve(router, "admin_revoke_key")
async def revoke_key(administration: Administration, admin: User, key_id: KeyId) -> None:
    await administration.revoke_key(admin, key_id)


@serve(router, "admin_usage")
async def usage(
    administration: Administration,
    admin: User,
    by: UsedBy = "user",
    hours: Annotated[int, Query(ge=1, le=MAX_HOURS)] = 24,
    limit: Limit = 100,
) -> AdminUsageResponse:
    """Of each user, key or run in the last hours, in tokens and seconds of device."""
    return AdminUsageResponse(usage=await administration.usage(by, hours, limit))


@serve(router, "admin_audit_log")
async def audit_log(
    administration: Administration,
    admin: User,
    limit: Limit = 100,
    offset: Offset = 0,
    user_id: UserFilter = None,
    event: Annotated[Text | None, Query()] = None,
) -> AdminAuditResponse:
    """Newest first; of one user, or only events whose name starts with `event`."""
    entries = await administration.audit(limit, offset, user_id=user_id, event=event)
    views = [AdminAuditEntry.model_validate(x, from_attributes=True) for x in entries]
    return AdminAuditResponse(entries=views)


def _key(key: ApiKey) -> AdminKey:
    return AdminKey.model_validate(key, from_attributes=True)
