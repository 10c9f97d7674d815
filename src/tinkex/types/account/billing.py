"""What was used and what it cost."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tinkex.types.fields.bounds import Name
from tinkex.types.fields.message import Listing, Request, Response, Texts


class GetBillingUsageRequest(Request):
    """A span of at most 14 days, aligned to hours."""

    starting_on: datetime
    ending_before: datetime


class GetCurrentCheckpointStorageUsageRequest(Request):
    """A project, or all projects of the caller when None."""

    project_id: Name | None = None


class TrainingBillingEvent(Response):
    """Tokens that went through a training pass."""

    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(Response):
    """Prompt tokens; `cached` ones were found in the prefix cache."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Response):
    """Tokens that were generated."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Response):
    """Checkpoints that were written."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(Response):
    """Space held over time."""

    type: Literal["storage"] = "storage"
    gigabyte_hours: float
    free: bool = False
    """Whether it costs nothing; a server of before SDK 0.38 does not say."""


BillingEventInfo: TypeAlias = Annotated[
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent,
    Field(discriminator="type"),
]


class BillingUsageEvent(Response):
    """Usage of one kind within one time bucket."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    training_run_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(Response):
    """The names and tags that a session was created with."""

    user_metadata: Texts | None = None


class BillingUsageResponse(Response):
    """Usage, and the metadata of its sessions. Costs are known up to `cost_data_through`."""

    data: Listing[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = {}
    cost_data_through: datetime | None = None


class CurrentCheckpointStorageUsageItem(Response):
    """Checkpoint storage of one user within one project."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Response):
    """Checkpoint storage as it stands now; costs only where a rate is known."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: Listing[CurrentCheckpointStorageUsageItem]
