"""How stored things look on the wire (contract 7.7 to 7.9): from record to message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from tinkex import types
from tinkex.server.guard.auth import ORGANIZATION, user_urn
from tinkex.server.http.inputs import moment
from tinkex.store import AuditEntry, Checkpoint, DeletedRun, Model, Session, UsageRow, User
from tinkex.types.account.administration import DeleteRunResponse
from tinkex.types.account.checkpoints import TYPE_BY_KIND

GIGABYTE = 1e9
_STATUS: TypeAdapter[types.SessionStatus] = TypeAdapter(types.SessionStatus)


def checkpoint_view(checkpoint: Checkpoint) -> types.Checkpoint:
    expires_at = checkpoint.expires_at
    return types.Checkpoint(
        checkpoint_id=checkpoint.checkpoint_id,
        checkpoint_type=TYPE_BY_KIND[checkpoint.kind],
        time=moment(checkpoint.created_at),
        tinker_path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=texts(checkpoint.user_metadata),
        expires_at=None if expires_at is None else moment(expires_at),
        base_model=checkpoint.base_model,
    )


def run_view(
    model: Model, last: Checkpoint | None = None, last_sampler: Checkpoint | None = None
) -> types.TrainingRun:
    return types.TrainingRun(
        training_run_id=model.model_id,
        base_model=model.base_model,
        model_owner=model.user_id,
        is_lora=True,
        corrupted=model.corrupted,
        lora_rank=model.lora.get("rank"),
        last_request_time=moment(model.last_request_time),
        last_checkpoint=checkpoint_view(last) if last else None,
        last_sampler_checkpoint=checkpoint_view(last_sampler) if last_sampler else None,
        user_metadata=texts(model.user_metadata),
        note=model.note,
        made_from=model.made_from,
        continues=_continues(model),
        continued_by=model.continued_by,
    )


def _continues(model: Model) -> types.RunReference | None:
    if model.continues is None:
        return None
    return types.RunReference(run_id=model.continues, step=model.continues_step or 0)


def weights_view(checkpoint: Checkpoint) -> types.WeightsInfoResponse:
    lora = checkpoint.lora
    parts = ("train_unembed", "train_mlp", "train_attn")
    return types.WeightsInfoResponse(
        base_model=checkpoint.base_model,
        is_lora=True,
        lora_rank=lora.get("rank"),
        optimizer_config=types.OptimizerConfigBase(**checkpoint.optimizer_config),
        **{part: lora.get(part) for part in parts},
    )


def session_summary(
    session: Session, num_checkpoints: int, size_bytes: int
) -> types.SessionSummary:
    return types.SessionSummary(
        session_id=session.session_id,
        created_at=moment(session.created_at),
        owner=user_urn(session.user_id),
        project_id=session.project_id or "",
        status=_STATUS.validate_python(session.status),
        checkpoints_count=num_checkpoints,
        display_name=session.display_name,
        user_metadata=texts(session.user_metadata),
        checkpoint_storage_bytes=size_bytes,
    )


def audit_view(entry: AuditEntry) -> types.AuditLogEntry:
    return types.AuditLogEntry(
        timestamp=moment(entry.timestamp),
        event=entry.event,
        event_details=entry.details,
        tinker_path=entry.details.get("tinker_path"),
    )


def usage_view(row: UsageRow, user_name: str) -> types.BillingUsageEvent:
    return types.BillingUsageEvent(
        bucket_start=moment(row.bucket_start),
        bucket_end=moment(row.bucket_start + 3600),
        base_model=row.base_model,
        user_id=row.user_id,
        user_name=user_name,
        session_id=row.session_id,
        project_id=row.project_id,
        training_run_id=row.model_id,
        event_info=_event_info(row),
    )


def _event_info(row: UsageRow) -> types.BillingEventInfo:
    count = round(row.count)
    if row.kind == "storage":
        return types.StorageBillingEvent(gigabyte_hours=row.count / GIGABYTE)
    if row.kind == "checkpoint":
        return types.CheckpointBillingEvent(count=count)
    if row.kind == "training":
        return types.TrainingBillingEvent(token_count=count)
    if row.kind == "sampling_sample":
        return types.SamplingSampleBillingEvent(token_count=count)
    cached = row.kind == "sampling_prefill_cached"
    return types.SamplingPrefillBillingEvent(cached=cached, token_count=count)


def storage_view(
    user: User, project_id: str | None, number: int, size_bytes: int
) -> types.CurrentCheckpointStorageUsageItem:
    return types.CurrentCheckpointStorageUsageItem(
        project_id=project_id,
        org_user_urn=f"tml:organization:{ORGANIZATION}:{user_urn(user.user_id)}",
        user_email=user.email or None,
        user_name=user.name,
        checkpoint_count=number,
        size_bytes=size_bytes,
        size_gigabytes=size_bytes / GIGABYTE,
    )


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata is text to text on the wire; whatever else a client stored is written as text."""
    if metadata is None:
        return None
    return {
        str(key): value if isinstance(value, str) else str(value) for key, value in metadata.items()
    }


def deletion_view(deleted: DeletedRun) -> DeleteRunResponse:
    return DeleteRunResponse(
        run_ids=list(deleted.model_ids),
        num_checkpoints=deleted.num_checkpoints,
        freed_bytes=deleted.freed_bytes,
    )
