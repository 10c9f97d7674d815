"""Every endpoint of the protocol, one row each: its path, its messages, how large, in what order.

Routes, request decoding, OpenAPI, body limits and the tests read this table; nothing else says
which messages exist. A row's name is the last part of the path (`optim_step`), or what the call
does where that is not unique (`finish_session`). Rows of one lane's operations are `is_ordered`:
they carry `model_id` and `seq_id` and run in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tinkex import types
from tinkex.types.account.administration import (
    AddKeyRequest,
    AddKeyResponse,
    AdminAuditResponse,
    AdminKeysResponse,
    AdminRunsResponse,
    AdminSessionsResponse,
    AdminUsageResponse,
    AdminUser,
    AdminUsersResponse,
    SetQuotasRequest,
    StopWorkRequest,
    StopWorkResponse,
)
from tinkex.types.service.extensions import (
    CancelFutureResponse,
    DeleteTrajectoryResponse,
    LogMetricsRequest,
    LogMetricsResponse,
    NameCheckpointRequest,
    ProcessRequest,
    RemoveNameResponse,
    SampleBatchRequest,
    SampleBatchResponse,
)

API = "/api/v1"
MIB = 1024 * 1024

Size = Literal["small", "medium", "large", "file"]
MAX_BYTES: dict[Size, int] = {
    "small": MIB,  # a few fields
    "medium": 16 * MIB,  # a prompt, a graph, a list of ids
    "large": 32 * MIB,  # training data, many prompts; a server's own setting may say more
    "file": 2**40,  # never parsed as a whole: the server's own setting is the limit
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What both sides agree on about one call."""

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    request: Any = None
    """The message in the body; None when there is no body."""
    result: Any = None
    """What a 200 answers; None for 204 and for what is not JSON."""
    promised: Any = None
    """What the promise becomes, where the result is a promise."""
    size: Size = "small"
    is_ordered: bool = False
    changes_state: bool = False
    """Replayed after a crash."""
    is_barrier: bool = False
    """Runs alone: what came before it ends first, and what comes after waits."""
    keeps_null: bool = False
    """None is a statement ("keep it for good") and is sent as null in every dialect."""

    @property
    def max_bytes(self) -> int:
        return MAX_BYTES[self.size]


def _post(name: str, request: Any, result: Any, path: str = "", **rest: Any) -> Endpoint:
    where = path or f"{API}/{name}"
    return Endpoint(name=name, method="POST", path=where, request=request, result=result, **rest)


def _put(name: str, path: str, request: Any, result: Any = None, **rest: Any) -> Endpoint:
    return Endpoint(name=name, method="PUT", path=path, request=request, result=result, **rest)


def _delete(name: str, path: str, result: Any = None) -> Endpoint:
    return Endpoint(name=name, method="DELETE", path=path, result=result)


def _promise(name: str, request: Any, promised: Any, **rest: Any) -> Endpoint:
    """A call that ends in a promise."""
    return _post(name, request, types.UntypedAPIFuture, promised=promised, **rest)


def _get(name: str, path: str, result: Any = None) -> Endpoint:
    return Endpoint(name=name, method="GET", path=path, result=result)


_RUN = f"{API}/training_runs/{{run_id}}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"
_ADMIN = "/tinkex/v1/admin"
_USER = f"{_ADMIN}/users/{{user_id}}"
_SESSION = f"{API}/sessions/{{session_id}}"
_NAMES = f"{API}/checkpoint_names"
_TRAJECTORY = f"{API}/trajectories/{{trajectory_id}}"
_COMPUTE = {"is_ordered": True, "size": "large"}
_SAVE = {"is_ordered": True, "is_barrier": True}

_ROWS = [
    # ---------------------------------------------------------------------------- training
    _promise(
        "forward_backward",
        types.ForwardBackwardRequest,
        types.ForwardBackwardOutput,
        changes_state=True,
        **_COMPUTE,
    ),
    _promise("forward", types.ForwardRequest, types.ForwardBackwardOutput, **_COMPUTE),
    _promise(
        "optim_step",
        types.OptimStepRequest,
        types.OptimStepResponse,
        is_ordered=True,
        changes_state=True,
    ),
    _promise(
        "load_weights",
        types.LoadWeightsRequest,
        types.LoadWeightsResponse,
        is_ordered=True,
        changes_state=True,
        is_barrier=True,
    ),
    _promise("save_weights", types.SaveWeightsRequest, types.SaveWeightsResponse, **_SAVE),
    _promise(
        "save_weights_for_sampler",
        types.SaveWeightsForSamplerRequest,
        types.SaveWeightsForSamplerResponseInternal,
        **_SAVE,
    ),
    _promise(
        "save_weights_external",
        types.SaveWeightsExternalRequest,
        types.SaveWeightsExternalResponseInternal,
        **_SAVE,
    ),
    _promise(
        "create_model",
        types.CreateModelRequest,
        types.CreateModelResponse,
        changes_state=True,
        is_barrier=True,
    ),
    _promise(
        "create_custom_loss",
        types.CreateCustomLossRequest,
        types.CreateCustomLossResponse,
        size="medium",
    ),
    _promise("unload_model", types.UnloadModelRequest, types.UnloadModelResponse),
    _post("get_info", types.GetInfoRequest, types.GetInfoResponse),
    _post("log_metrics", LogMetricsRequest, LogMetricsResponse),
    # ---------------------------------------------------------------------------- sampling
    _promise("asample", types.SampleRequest, types.SampleResponse, size="medium"),
    _post("asample_batch", SampleBatchRequest, SampleBatchResponse, size="large"),
    _post("sample_stream", types.SampleRequest, None, size="medium"),
    _post(
        "create_sampling_session",
        types.CreateSamplingSessionRequest,
        types.CreateSamplingSessionResponse,
    ),
    _post(
        "join_sampling_session",
        types.JoinSamplingSessionRequest,
        types.JoinSamplingSessionResponse,
    ),
    _get("get_sampler", f"{API}/samplers/{{sampler_id}}", types.GetSamplerResponse),
    # ---------------------------------------------------------------------------- results
    _post("retrieve_future", types.FutureRetrieveRequest, None),
    _post(
        "retrieve_futures",
        types.FuturesRetrieveRequest,
        types.FuturesRetrieveResponse,
        size="medium",
    ),
    _post("cancel_future", types.CancelFutureRequest, CancelFutureResponse),
    # ---------------------------------------------------------------------------- service
    _post(
        "client_config",
        types.ClientConfigRequest,
        types.ClientConfigResponse,
        f"{API}/client/config",
    ),
    _post(
        "client_dynamic_config",
        types.ClientConfigRequest,
        types.ClientDynamicConfigResponse,
        f"{API}/client/dynamic_config",
    ),
    _post("create_session", types.CreateSessionRequest, types.CreateSessionResponse),
    _post("session_heartbeat", types.SessionHeartbeatRequest, types.SessionHeartbeatResponse),
    _post("telemetry", types.TelemetrySendRequest, types.TelemetryResponse),
    _get(
        "get_server_capabilities",
        f"{API}/get_server_capabilities",
        types.GetServerCapabilitiesResponse,
    ),
    _post("attach", ProcessRequest, None, "/tinkex/v1/attach"),
    _post("detach", ProcessRequest, None, "/tinkex/v1/detach"),
    # ---------------------------------------------------------------------------- sessions
    _get("list_sessions", f"{API}/sessions", types.ListSessionsResponse),
    _post(
        "search_sessions",
        types.SessionSearchRequest,
        types.SessionSearchResponse,
        f"{API}/sessions/search",
    ),
    _get("get_session", _SESSION, types.GetSessionResponse),
    _get("export_session_trace", f"{_SESSION}/trace_export", types.TraceExportResponse),
    _post(
        "finish_session", types.FinishSessionRequest, None, f"{_SESSION}/finish", keeps_null=True
    ),
    _put("assign_session_project", f"{_SESSION}/project", types.AssignSessionProjectRequest),
    # ---------------------------------------------------------------------------- runs
    _get("list_training_runs", f"{API}/training_runs", types.TrainingRunsResponse),
    _get("get_training_run", _RUN, types.TrainingRun),
    _get("list_checkpoints", f"{_RUN}/checkpoints", types.CheckpointsListResponse),
    _get("list_user_checkpoints", f"{API}/checkpoints", types.CheckpointsListResponse),
    _delete("delete_checkpoint", _CHECKPOINT),
    _post("publish_checkpoint", None, None, f"{_CHECKPOINT}/publish"),
    _delete("unpublish_checkpoint", f"{_CHECKPOINT}/publish"),
    _put(
        "set_checkpoint_ttl",
        f"{_CHECKPOINT}/ttl",
        types.SetCheckpointTtlRequest,
        keeps_null=True,
    ),
    _get("checkpoint_archive", f"{_CHECKPOINT}/archive", types.CheckpointArchiveUrlResponse),
    _get(
        "external_weights_urls",
        f"{_CHECKPOINT}/external_weights_urls",
        types.ExternalWeightsUrlsResponse,
    ),
    _post("weights_info", types.WeightsInfoRequest, types.WeightsInfoResponse),
    _post("copy_weights", types.CopyWeightsRequest, types.CopyWeightsResponse),
    _post("import_checkpoint", None, None, f"{API}/checkpoints/import", size="file"),
    _get("download", f"{API}/signed/{{token}}/{{file_name:path}}"),
    _get("list_checkpoint_names", _NAMES, types.CheckpointNamesResponse),
    _post("name_checkpoint", NameCheckpointRequest, types.CheckpointName, _NAMES),
    _delete("remove_checkpoint_name", f"{_NAMES}/{{name}}", RemoveNameResponse),
    # ---------------------------------------------------------------------------- trajectories
    _get("get_trajectory", _TRAJECTORY, types.Trajectory),
    _delete("delete_trajectory", _TRAJECTORY, DeleteTrajectoryResponse),
    # ---------------------------------------------------------------------------- account
    _get("health", f"{API}/healthz", types.HealthResponse),
    _post("exchange_token", None, types.AuthTokenResponse, f"{API}/auth/token"),
    _get("describe_key", f"{API}/auth/apikey/me", types.ApiKeyResponse),
    _delete("revoke_key", f"{API}/auth/apikey/me"),
    _get("audit_log", f"{API}/audit", types.AuditLogResponse),
    _get("billing_usage", f"{API}/billing/usage/events", types.BillingUsageResponse),
    _get(
        "checkpoint_storage_usage",
        f"{API}/billing/usage/checkpoints/current",
        types.CurrentCheckpointStorageUsageResponse,
    ),
    # ---------------------------------------------------------------------------- administrators
    _get("admin_list_users", f"{_ADMIN}/users", AdminUsersResponse),
    _get("admin_get_user", _USER, AdminUser),
    _post("admin_disable_user", StopWorkRequest, StopWorkResponse, f"{_USER}/disable"),
    _post("admin_enable_user", None, None, f"{_USER}/enable"),
    _post("admin_stop_user", StopWorkRequest, StopWorkResponse, f"{_USER}/stop"),
    _put("admin_set_quotas", f"{_USER}/quotas", SetQuotasRequest, AdminUser, keeps_null=True),
    _get("admin_list_sessions", f"{_ADMIN}/sessions", AdminSessionsResponse),
    _post(
        "admin_stop_session",
        StopWorkRequest,
        StopWorkResponse,
        f"{_ADMIN}/sessions/{{session_id}}/stop",
    ),
    _get("admin_list_runs", f"{_ADMIN}/runs", AdminRunsResponse),
    _post("admin_stop_run", StopWorkRequest, StopWorkResponse, f"{_ADMIN}/runs/{{run_id}}/stop"),
    _get("admin_list_keys", f"{_ADMIN}/keys", AdminKeysResponse),
    _post("admin_add_key", AddKeyRequest, AddKeyResponse, f"{_ADMIN}/keys"),
    _delete("admin_revoke_key", f"{_ADMIN}/keys/{{key_id}}"),
    _get("admin_usage", f"{_ADMIN}/usage", AdminUsageResponse),
    _get("admin_audit_log", f"{_ADMIN}/audit", AdminAuditResponse),
]

ENDPOINTS: dict[str, Endpoint] = {row.name: row for row in _ROWS}
