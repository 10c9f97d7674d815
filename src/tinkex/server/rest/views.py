"""How stored things look on the wire (contract 7.7 to 7.9). Pure functions of records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex.server.auth import ORGANIZATION, user_urn
from tinkex.server.files.checkpoints import WIRE_TYPES
from tinkex.server.rest.inputs import rfc3339
from tinkex.store import AuditEntry, Checkpoint, Model, Session, UsageRow

GIGABYTE = 1e9


def checkpoint_view(checkpoint: Checkpoint) -> dict[str, Any]:
    expires_at = checkpoint.expires_at
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": WIRE_TYPES[checkpoint.kind],
        "time": rfc3339(checkpoint.created_at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if expires_at is None else rfc3339(expires_at),
    }


def run_view(
    model: Model, last: Checkpoint | None = None, last_sampler: Checkpoint | None = None
) -> dict[str, Any]:
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.user_id,
        "is_lora": True,
        "corrupted": model.corrupted,
        "lora_rank": model.lora.get("rank"),
        "last_request_time": rfc3339(model.last_request_time),
        "last_checkpoint": checkpoint_view(last) if last else None,
        "last_sampler_checkpoint": checkpoint_view(last_sampler) if last_sampler else None,
        "user_metadata": texts(model.user_metadata),
    }


def weights_view(checkpoint: Checkpoint) -> dict[str, Any]:
    lora = checkpoint.lora
    return {
        "base_model": checkpoint.base_model,
        "is_lora": True,
        "lora_rank": lora.get("rank"),
        "train_unembed": lora.get("train_unembed"),
        "train_mlp": lora.get("train_mlp"),
        "train_attn": lora.get("train_attn"),
        "optimizer_config": checkpoint.optimizer_config,
    }


def session_summary(session: Session, num_checkpoints: int, size_bytes: int) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "created_at": rfc3339(session.created_at),
        "owner": user_urn(session.user_id),
        "project_id": session.project_id or "",
        "status": session.status,
        "checkpoints_count": num_checkpoints,
        "display_name": session.display_name,
        "user_metadata": texts(session.user_metadata),
        "checkpoint_storage_bytes": size_bytes,
    }


def audit_view(entry: AuditEntry) -> dict[str, Any]:
    return {
        "timestamp": rfc3339(entry.timestamp),
        "event": entry.event,
        "event_details": entry.details,
        "tinker_path": entry.details.get("tinker_path"),
    }


def usage_view(row: UsageRow, user_name: str) -> dict[str, Any]:
    return {
        "bucket_start": rfc3339(row.bucket_start),
        "bucket_end": rfc3339(row.bucket_start + 3600),
        "base_model": row.base_model,
        "user_id": row.user_id,
        "user_name": user_name,
        "session_id": row.session_id,
        "project_id": row.project_id,
        "training_run_id": row.model_id,
        "event_info": _event_info(row),
    }


def _event_info(row: UsageRow) -> dict[str, Any]:
    if row.kind == "storage":
        return {"type": "storage", "gigabyte_hours": row.count / GIGABYTE}
    count = round(row.count)
    if row.kind == "checkpoint":
        return {"type": "checkpoint", "count": count}
    if row.kind == "training":
        return {"type": "training", "token_count": count}
    if row.kind == "sampling_sample":
        return {"type": "sampling_sample", "token_count": count}
    cached = row.kind == "sampling_prefill_cached"
    return {"type": "sampling_prefill", "cached": cached, "token_count": count}


def storage_view(
    user_id: str, user_name: str, email: str, project_id: str | None, number: int, size_bytes: int
) -> dict[str, Any]:
    return {
        "project_id": project_id,
        "org_user_urn": f"tml:organization:{ORGANIZATION}:{user_urn(user_id)}",
        "user_email": email or None,
        "user_name": user_name,
        "checkpoint_count": number,
        "size_bytes": size_bytes,
        "size_gigabytes": size_bytes / GIGABYTE,
    }


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata is text to text on the wire; whatever else a client stored is written as text."""
    if metadata is None:
        return None
    return {
        str(key): value if isinstance(value, str) else str(value) for key, value in metadata.items()
    }
