"""Who did what to which resource, and when."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tinkex.types.fields.message import Listing, Response


class AuditLogEntry(Response):
    """`event` is `RESOURCE_ACTION`; the last three fields are deprecated."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any] = {}
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Response):
    """Entries of one day, or of all days kept."""

    entries: Listing[AuditLogEntry]
