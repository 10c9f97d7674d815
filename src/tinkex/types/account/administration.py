"""What administrators see of all users, and what they change.

Only servers of Tinkex know these; an ordinary key is answered with 403.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from tinkex.types.account.checkpoints import Cursor
from tinkex.types.fields.bounds import Id, Name, text
from tinkex.types.fields.message import Listing, Request, Response

Reason: TypeAlias = Annotated[str, text(1000)]
"""Told to the user whose work is ended, and kept in the audit log."""


KeyRole: TypeAlias = Literal["user", "admin", "metrics"]
"""`admin` sees and stops what all users do; `metrics` reads `/metrics` and nothing else."""


class AdminUser(Response):
    """A user, what they hold, and what they may hold."""

    user_id: str
    name: str
    created_at: datetime
    disabled_at: datetime | None = None
    paused_until: datetime | None = None
    """When work runs again of a user whose jobs ended workers; None: it is not paused."""
    pause_reason: str = ""
    is_admin: bool
    num_keys: int
    num_sessions: int
    """Sessions that are not over and gave a sign of life within a day."""
    num_models: int
    """Models whose state is kept."""
    disk_bytes: int
    """Checkpoints."""
    num_queued: int
    """Training requests and samples that wait."""
    num_running: int
    """Training requests and samples that a worker holds."""
    result_bytes: int
    """Samples that wait to be fetched."""
    quotas: dict[str, float]
    """The limits that hold, by name; 0 means none."""
    own_quotas: dict[str, float]
    """Those among them that were set for this user."""


class AdminUsersResponse(Response):
    users: Listing[AdminUser]
    cursor: Cursor


class AdminSession(Response):
    session_id: str
    user_id: str
    display_name: str | None = None
    project_id: str | None = None
    created_at: datetime
    last_heartbeat: datetime
    status: dict[str, Any]


class AdminSessionsResponse(Response):
    sessions: Listing[AdminSession]


class AdminRun(Response):
    run_id: str
    user_id: str
    session_id: str
    base_model: str
    created_at: datetime
    last_request_time: datetime
    num_queued: int
    num_running: int
    doing: str
    """Why its oldest request is not done; empty when it has none."""


class AdminRunsResponse(Response):
    runs: Listing[AdminRun]
    cursor: Cursor


class AdminKey(Response):
    """A key by its number; the key itself is not stored."""

    key_id: int
    user_id: str
    name: str
    note: str
    role: KeyRole
    created_at: datetime
    revoked_at: datetime | None = None
    requests_per_minute: float = 0.0
    """A limit of its own beneath its user's; 0: none."""


class AdminKeysResponse(Response):
    keys: Listing[AdminKey]


class AddKeyRequest(Request):
    """A key for a user, who is made when new."""

    user_id: Annotated[str, text(200, 1)]
    name: Name = ""
    role: KeyRole = "user"
    requests_per_minute: Annotated[float, Field(ge=0, le=2**62)] = 0.0
    """A limit of the key's own beneath its user's; 0: none."""


class AddKeyResponse(AdminKey):
    key: str
    """Shown this once."""


class AdminAuditEntry(Response):
    timestamp: datetime
    user_id: str
    event: str
    details: dict[str, Any]


class AdminAuditResponse(Response):
    """Newest first."""

    entries: Listing[AdminAuditEntry]


class AdminUsage(Response):
    """The usage of a user, a key or a run."""

    user_id: str
    key_id: int | None = None
    """A key by its number; none where the server was open or the key is not known."""
    key_name: str | None = None
    run_id: str | None = None
    """None: samples of base models, or usage that is not told by run."""
    counts: dict[str, float]
    """Tokens by kind (`training`, `sampling_prefill`, `sampling_prefill_cached`,
    `sampling_sample`), and `device_seconds`."""


class AdminUsageResponse(Response):
    """Most time of the device first."""

    usage: Listing[AdminUsage]


class StopWorkRequest(Request):
    reason: Reason = ""


class StopWorkResponse(Response):
    num_ended: int
    """Requests that were queued or running."""


class DeleteRunResponse(Response):
    """A run that is gone for good; what it used stays billed."""

    run_ids: list[str]
    """Its segments, where it was resumed."""
    num_checkpoints: int
    freed_bytes: int
    """Of its checkpoints."""


class SetQuotasRequest(Request):
    """Limits of one user, by name; null goes back to the server's own."""

    quotas: Annotated[
        dict[Id, Annotated[float, Field(ge=0, le=2**62)] | None], Field(max_length=50)
    ]
