"""Audit log, usage and storage cost of an organization."""

from __future__ import annotations

from datetime import UTC, date, datetime

from tinkex import types
from tinkex.client.direct import awaited
from tinkex.client.futures import APIFuture
from tinkex.client.rest.rest_client import Caller
from tinkex.errors import InvalidInputError

__all__ = ["AdminClient"]

_EVENT_TYPES = ("all", "checkpoints", "projects", "teams", "organizations")


class AdminClient(Caller):
    """Calls that need the rights of an administrator."""

    def get_audit_log(
        self, event_type: str = "all", day: date | str | None = None
    ) -> APIFuture[types.AuditLogResponse]:
        """Who did what, on one day (`YYYY-MM-DD`) or lately."""
        if event_type not in _EVENT_TYPES:
            raise InvalidInputError(
                f"must be one of {', '.join(_EVENT_TYPES)}, got {event_type!r}", path="event_type"
            )
        query = {"event_type": event_type, "day": day.isoformat() if isinstance(day, date) else day}
        return self._get("get_audit_log", "audit", types.AuditLogResponse, query, "redirect")

    get_audit_log_async = awaited(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[types.BillingUsageResponse]:
        """Usage between two full hours, at most 14 days apart."""
        query = {
            "starting_on": _moment(starting_on, "starting_on"),
            "ending_before": _moment(ending_before, "ending_before"),
        }
        return self._get(
            "get_billing_usage", "billing/usage/events", types.BillingUsageResponse, query
        )

    get_billing_usage_async = awaited(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[types.CurrentCheckpointStorageUsageResponse]:
        """What the checkpoints stored now take and cost."""
        return self._get(
            "get_current_checkpoint_storage_usage",
            "billing/usage/checkpoints/current",
            types.CurrentCheckpointStorageUsageResponse,
            {"project_id": project_id},
        )

    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)


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
