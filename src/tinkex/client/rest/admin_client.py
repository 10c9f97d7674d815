"""Audit log, usage and storage cost of an organization; users and their work, of our servers."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Literal

from tinkex import types
from tinkex.client.futures import APIFuture
from tinkex.client.http.options import Options
from tinkex.client.rest.budget_calls import BudgetCalls
from tinkex.client.rest.caller import quoted
from tinkex.client.twins import awaited
from tinkex.errors import InvalidInputError
from tinkex.types.account.administration import (
    AdminUsageResponse,
    AdminUsersResponse,
    DeleteRunResponse,
    StopWorkRequest,
    StopWorkResponse,
)
from tinkex.types.account.budgets import BudgetsResponse

_EVENT_TYPES = ("all", "checkpoints", "projects", "teams", "organizations")


class AdminClient(BudgetCalls):
    """Calls that need the rights of an administrator."""

    _row_prefix = "admin_"

    def get_audit_log(
        self, event_type: str = "all", day: date | str | None = None, *, options: Options = None
    ) -> APIFuture[types.AuditLogResponse]:
        """The audit log of one day (`YYYY-MM-DD`), or the latest entries: who did what."""
        if event_type not in _EVENT_TYPES:
            raise InvalidInputError(
                f"must be one of {', '.join(_EVENT_TYPES)}, got {event_type!r}", path="event_type"
            )
        query = {"event_type": event_type, "day": day.isoformat() if isinstance(day, date) else day}
        return self._ask(
            "get_audit_log", "audit_log", query=query, pool="redirect", options=options
        )

    get_audit_log_async = awaited(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str, *, options: Options = None
    ) -> APIFuture[types.BillingUsageResponse]:
        """Usage between two full hours, at most 14 days apart."""
        query = {
            "starting_on": _moment(starting_on, "starting_on"),
            "ending_before": _moment(ending_before, "ending_before"),
        }
        return self._ask("get_billing_usage", "billing_usage", query=query, options=options)

    get_billing_usage_async = awaited(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None, *, options: Options = None
    ) -> APIFuture[types.CurrentCheckpointStorageUsageResponse]:
        """Size and cost of the checkpoints stored now."""
        method, query = "get_current_checkpoint_storage_usage", {"project_id": project_id}
        return self._ask(method, "checkpoint_storage_usage", query=query, options=options)

    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)

    # -- servers of Tinkex alone, with an admin key

    def list_users(
        self, limit: int = 50, offset: int = 0, *, options: Options = None
    ) -> APIFuture[AdminUsersResponse]:
        """A page of all users, what each of them holds and may hold."""
        query = {"limit": limit, "offset": offset}
        return self._ask("list_users", "admin_list_users", query=query, options=options)

    list_users_async = awaited(list_users)

    def get_usage(
        self,
        by: Literal["user", "key", "run"] = "user",
        hours: int = 24,
        limit: int = 100,
        *,
        options: Options = None,
    ) -> APIFuture[AdminUsageResponse]:
        """Tokens and seconds of device of each user, key or run in the last hours.

        Most time of the device first. What a key used is told by its number, never by itself.
        """
        query = {"by": by, "hours": hours, "limit": limit}
        return self._ask("get_usage", "admin_usage", query=query, options=options)

    get_usage_async = awaited(get_usage)

    def disable_user(
        self, user_id: str, reason: str = "", *, options: Options = None
    ) -> APIFuture[StopWorkResponse]:
        """Refuse a user from now on and end their work; what they stored is kept."""
        return self._stop("disable_user", reason, user_id=user_id, options=options)

    disable_user_async = awaited(disable_user)

    def enable_user(self, user_id: str, *, options: Options = None) -> APIFuture[None]:
        """Let a user in again that was disabled."""
        return self._ask(
            "enable_user", "admin_enable_user", user_id=quoted(user_id, "user_id"), options=options
        )

    enable_user_async = awaited(enable_user)

    def list_budgets(self, user_id: str, *, options: Options = None) -> APIFuture[BudgetsResponse]:
        """The budgets of a user, of their keys and of their runs, with what was spent of each."""
        part = quoted(user_id, "user_id")
        return self._ask("list_budgets", "admin_list_budgets", user_id=part, options=options)

    list_budgets_async = awaited(list_budgets)

    def lift_pause(self, user_id: str, *, options: Options = None) -> APIFuture[None]:
        """Run the work of a user again that is paused because it ended workers."""
        user = quoted(user_id, "user_id")
        return self._ask("lift_pause", "admin_lift_pause", user_id=user, options=options)

    lift_pause_async = awaited(lift_pause)

    def stop_user(
        self, user_id: str, reason: str = "", *, options: Options = None
    ) -> APIFuture[StopWorkResponse]:
        """End what a user has queued and running; they may go on. `reason` is told to them."""
        return self._stop("stop_user", reason, user_id=user_id, options=options)

    stop_user_async = awaited(stop_user)

    def stop_session(
        self, session_id: str, reason: str = "", *, options: Options = None
    ) -> APIFuture[StopWorkResponse]:
        """End a session of any user and its work; its runs and checkpoints stay."""
        return self._stop("stop_session", reason, session_id=session_id, options=options)

    stop_session_async = awaited(stop_session)

    def stop_run(
        self, run_id: str, reason: str = "", *, options: Options = None
    ) -> APIFuture[StopWorkResponse]:
        """End what a run of any user has queued and running; its client goes on."""
        return self._stop("stop_run", reason, run_id=run_id, options=options)

    stop_run_async = awaited(stop_run)

    def delete_run(self, run_id: str, *, options: Options = None) -> APIFuture[DeleteRunResponse]:
        """Delete a run of any user for good; refused while it trains or is published."""
        run = quoted(run_id, "run_id")
        return self._ask("delete_run", "admin_delete_run", run_id=run, options=options)

    delete_run_async = awaited(delete_run)

    def _stop(
        self, method: str, reason: str, *, options: Options, **ids: str
    ) -> APIFuture[StopWorkResponse]:
        request = StopWorkRequest(reason=reason)
        parts = {name: quoted(value, name) for name, value in ids.items()}
        return self._ask(method, f"admin_{method}", request, options=options, **parts)


def _moment(value: datetime | str, name: str) -> str:
    """RFC 3339 in UTC: `2026-07-13T00:00:00Z`. A time without a zone is taken as UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidInputError(
                f"expected a time such as 2026-07-13T00:00:00Z, got {value!r}", path=name
            ) from None
    if not isinstance(value, datetime):
        raise InvalidInputError(f"expected a datetime, got {value!r}", path=name)
    moment = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    return moment.isoformat().replace("+00:00", "Z")
