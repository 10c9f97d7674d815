"""Every endpoint of the protocol, one row each: its path, its messages, their cost, in what order.

Routes, request decoding, OpenAPI, body limits and the tests read this table; nothing else says
which messages exist. A row's name is the last part of the path (`optim_step`), or what the call
does where that is not unique (`finish_session`). Rows of one lane's operations are `is_ordered`:
they carry `model_id` and `seq_id` and run in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

from tinkex import types
from tinkex.contract import cost
from tinkex.contract.cost import Cost

API = "/api/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A call as client and server agree on it."""

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    request_name: str | None = None
    result_name: str | None = None
    promised_name: str | None = None
    limit: Cost = cost.SMALL
    """The most that a request may cost."""
    is_ordered: bool = False
    changes_state: bool = False
    """Replayed after a crash."""
    is_barrier: bool = False
    """Runs alone: what came before it ends first, and what comes after waits."""
    keeps_null: bool = False
    """None is a statement ("keep it for good") and is sent as null in every dialect."""

    @property
    def request(self) -> Any:
        """The message in the body; None when there is no body."""
        return _message(self.request_name)

    @property
    def result(self) -> Any:
        """The message of a 200; None for 204 and for answers that are not JSON."""
        return _message(self.result_name)

    @property
    def promised(self) -> Any:
        """The message that a promise becomes, where the result is a promise."""
        return _message(self.promised_name)


# Messages that only servers of Tinkex know.
_ONLY_OURS = (
    "tinkex.types.service.extensions",
    "tinkex.types.account.administration",
    "tinkex.types.account.budgets",
    "tinkex.types.account.estimates",
    "tinkex.types.training.reverse_kl",
)


@cache
def _message(name: str | None) -> Any:
    """The class of a message, loaded when it is asked for: a client never meets most of them."""
    if name is None:
        return None
    if name in types.__all__:
        return getattr(types, name)
    for module in _ONLY_OURS:
        if (found := getattr(import_module(module), name, None)) is not None:
            return found
    raise LookupError(f"there is no message {name}")


def _post(
    name: str, request: str | None, result: str | None, path: str = "", **rest: Any
) -> Endpoint:
    where = path or f"{API}/{name}"
    return Endpoint(
        name=name, method="POST", path=where, request_name=request, result_name=result, **rest
    )


def _put(name: str, path: str, request: str, result: str | None = None, **rest: Any) -> Endpoint:
    return Endpoint(
        name=name, method="PUT", path=path, request_name=request, result_name=result, **rest
    )


def _delete(name: str, path: str, result: str | None = None) -> Endpoint:
    return Endpoint(name=name, method="DELETE", path=path, result_name=result)


def _promise(name: str, request: str, promised: str, **rest: Any) -> Endpoint:
    """A call that ends in a promise."""
    return _post(name, request, "UntypedAPIFuture", promised_name=promised, **rest)


def _get(name: str, path: str, result: str | None = None) -> Endpoint:
    return Endpoint(name=name, method="GET", path=path, result_name=result)


_RUN = f"{API}/training_runs/{{run_id}}"
_OUR_RUN = "/tinkex/v1/runs/{run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"
_ADMIN = "/tinkex/v1/admin"
_USER = f"{_ADMIN}/users/{{user_id}}"
_BUDGET = "budgets/{scope}/{subject}/{unit}"
_SESSION = f"{API}/sessions/{{session_id}}"
_NAMES = f"{API}/checkpoint_names"
_TRAJECTORY = f"{API}/trajectories/{{trajectory_id}}"
_COMPUTE = {"is_ordered": True, "limit": cost.TRAINING}
_SAVE = {"is_ordered": True, "is_barrier": True}

_ROWS = [
    # ---------------------------------------------------------------------------- training
    _promise(
        "forward_backward",
        "ForwardBackwardRequest",
        "ForwardBackwardOutput",
        changes_state=True,
        **_COMPUTE,
    ),
    _promise(
        "forward_backward_reverse_kl",
        "ForwardBackwardReverseKLRequest",
        "ForwardBackwardReverseKLResponse",
        path=f"{API}/mint/forward_backward_reverse_kl",
        changes_state=True,
        **_COMPUTE,
    ),
    _promise("forward", "ForwardRequest", "ForwardBackwardOutput", **_COMPUTE),
    _promise(
        "optim_step",
        "OptimStepRequest",
        "OptimStepResponse",
        is_ordered=True,
        changes_state=True,
    ),
    _promise(
        "load_weights",
        "LoadWeightsRequest",
        "LoadWeightsResponse",
        is_ordered=True,
        changes_state=True,
        is_barrier=True,
    ),
    _promise("save_weights", "SaveWeightsRequest", "SaveWeightsResponse", **_SAVE),
    _promise(
        "save_weights_for_sampler",
        "SaveWeightsForSamplerRequest",
        "SaveWeightsForSamplerResponseInternal",
        **_SAVE,
    ),
    _promise(
        "save_weights_external",
        "SaveWeightsExternalRequest",
        "SaveWeightsExternalResponseInternal",
        **_SAVE,
    ),
    _promise(
        "create_model",
        "CreateModelRequest",
        "CreateModelResponse",
        changes_state=True,
        is_barrier=True,
        limit=cost.MODEL,
    ),
    _promise(
        "create_custom_loss",
        "CreateCustomLossRequest",
        "CreateCustomLossResponse",
        limit=cost.MEDIUM,
    ),
    _promise("unload_model", "UnloadModelRequest", "UnloadModelResponse"),
    _post("get_info", "GetInfoRequest", "GetInfoResponse"),
    _post("log_metrics", "LogMetricsRequest", "LogMetricsResponse"),
    # ---------------------------------------------------------------------------- sampling
    _promise("asample", "SampleRequest", "SampleResponse", limit=cost.SAMPLE),
    _post("asample_batch", "SampleBatchRequest", "SampleBatchResponse", limit=cost.SAMPLES),
    _post("sample_stream", "SampleRequest", None, limit=cost.SAMPLE),
    _post(
        "create_sampling_session",
        "CreateSamplingSessionRequest",
        "CreateSamplingSessionResponse",
    ),
    _post(
        "join_sampling_session",
        "JoinSamplingSessionRequest",
        "JoinSamplingSessionResponse",
    ),
    _get("get_sampler", f"{API}/samplers/{{sampler_id}}", "GetSamplerResponse"),
    # ---------------------------------------------------------------------------- results
    _post("retrieve_future", "FutureRetrieveRequest", None),
    _post(
        "retrieve_futures",
        "FuturesRetrieveRequest",
        "FuturesRetrieveResponse",
        limit=cost.MEDIUM,
    ),
    _post("cancel_future", "CancelFutureRequest", "CancelFutureResponse"),
    # ---------------------------------------------------------------------------- service
    _post(
        "client_config",
        "ClientConfigRequest",
        "ClientConfigResponse",
        f"{API}/client/config",
    ),
    _post(
        "client_dynamic_config",
        "ClientConfigRequest",
        "ClientDynamicConfigResponse",
        f"{API}/client/dynamic_config",
    ),
    _post("create_session", "CreateSessionRequest", "CreateSessionResponse"),
    _post("session_heartbeat", "SessionHeartbeatRequest", "SessionHeartbeatResponse"),
    _post("telemetry", "TelemetrySendRequest", "TelemetryResponse"),
    _get(
        "get_server_capabilities",
        f"{API}/get_server_capabilities",
        "GetServerCapabilitiesResponse",
    ),
    _post("attach", "ProcessRequest", None, "/tinkex/v1/attach"),
    _post("detach", "ProcessRequest", None, "/tinkex/v1/detach"),
    # ---------------------------------------------------------------------------- sessions
    _get("list_sessions", f"{API}/sessions", "ListSessionsResponse"),
    _post(
        "search_sessions",
        "SessionSearchRequest",
        "SessionSearchResponse",
        f"{API}/sessions/search",
        limit=cost.SEARCH,
    ),
    _get("get_session", _SESSION, "GetSessionResponse"),
    _get("export_session_trace", f"{_SESSION}/trace_export", "TraceExportResponse"),
    _post("finish_session", "FinishSessionRequest", None, f"{_SESSION}/finish", keeps_null=True),
    _put("assign_session_project", f"{_SESSION}/project", "AssignSessionProjectRequest"),
    # ---------------------------------------------------------------------------- runs
    _get("list_training_runs", f"{API}/training_runs", "TrainingRunsResponse"),
    _get("get_training_run", _RUN, "TrainingRun"),
    _get("export_run_trace", f"{_RUN}/trace_export", "TraceExportResponse"),
    _post("stop_run", "StopWorkRequest", "StopWorkResponse", f"{_OUR_RUN}/stop"),
    _put("describe_run", _OUR_RUN, "DescribeRunRequest", "TrainingRun"),
    _delete("delete_run", _OUR_RUN, "DeleteRunResponse"),
    _get("list_checkpoints", f"{_RUN}/checkpoints", "CheckpointsListResponse"),
    _get("list_user_checkpoints", f"{API}/checkpoints", "CheckpointsListResponse"),
    _post(
        "search_checkpoints",
        "CheckpointSearchRequest",
        "CheckpointSearchResponse",
        f"{API}/checkpoints/search",
        limit=cost.SEARCH,
    ),
    _delete("delete_checkpoint", _CHECKPOINT),
    _post("publish_checkpoint", None, None, f"{_CHECKPOINT}/publish"),
    _delete("unpublish_checkpoint", f"{_CHECKPOINT}/publish"),
    _put(
        "set_checkpoint_ttl",
        f"{_CHECKPOINT}/ttl",
        "SetCheckpointTtlRequest",
        keeps_null=True,
    ),
    _get("checkpoint_archive", f"{_CHECKPOINT}/archive", "CheckpointArchiveUrlResponse"),
    _get(
        "external_weights_urls",
        f"{_CHECKPOINT}/external_weights_urls",
        "ExternalWeightsUrlsResponse",
    ),
    _post("weights_info", "WeightsInfoRequest", "WeightsInfoResponse"),
    _post("copy_weights", "CopyWeightsRequest", "CopyWeightsResponse"),
    _promise(
        "interpolate_checkpoints",
        "InterpolateCheckpointsRequest",
        "InterpolateCheckpointsResponse",
        path=f"{API}/mint/checkpoints/interpolate",
    ),
    _post("import_checkpoint", None, None, f"{API}/checkpoints/import", limit=cost.FILE),
    _post(
        "external_weights_upload_start",
        "ExternalWeightsUploadStartRequest",
        "ExternalWeightsUploadStartResponse",
        limit=cost.MODEL,
    ),
    Endpoint(
        name="upload_file",
        method="PUT",
        path=f"{API}/uploads/{{token}}/{{file_name}}",
        limit=cost.UPLOAD,
    ),
    _post(
        "external_weights_upload_finish",
        "ExternalWeightsUploadFinishRequest",
        "ExternalWeightsUploadFinishResponse",
    ),
    _get("download", f"{API}/signed/{{token}}/{{file_name:path}}"),
    _get("list_checkpoint_names", _NAMES, "CheckpointNamesResponse"),
    _post("name_checkpoint", "NameCheckpointRequest", "CheckpointName", _NAMES),
    _delete("remove_checkpoint_name", f"{_NAMES}/{{name}}", "RemoveNameResponse"),
    # ---------------------------------------------------------------------------- trajectories
    _get("get_trajectory", _TRAJECTORY, "Trajectory"),
    _delete("delete_trajectory", _TRAJECTORY, "DeleteTrajectoryResponse"),
    # ---------------------------------------------------------------------------- account
    _get("health", f"{API}/healthz", "HealthResponse"),
    _post("exchange_token", None, "AuthTokenResponse", f"{API}/auth/token"),
    _get("describe_key", f"{API}/auth/apikey/me", "ApiKeyResponse"),
    _delete("revoke_key", f"{API}/auth/apikey/me"),
    _get("audit_log", f"{API}/audit", "AuditLogResponse"),
    _get("billing_usage", f"{API}/billing/usage/events", "BillingUsageResponse"),
    _get(
        "checkpoint_storage_usage",
        f"{API}/billing/usage/checkpoints/current",
        "CurrentCheckpointStorageUsageResponse",
    ),
    # ---------------------------------------------------------------------------- budgets
    _get("list_budgets", "/tinkex/v1/budgets", "BudgetsResponse"),
    _put("set_budget", f"/tinkex/v1/{_BUDGET}", "SetBudgetRequest", "BudgetInfo"),
    _delete("remove_budget", f"/tinkex/v1/{_BUDGET}"),
    _post("estimate", "EstimateRequest", "Estimate", "/tinkex/v1/estimate"),
    _get("admin_list_budgets", f"{_USER}/budgets", "BudgetsResponse"),
    _put("admin_set_budget", f"{_ADMIN}/{_BUDGET}", "SetBudgetRequest", "BudgetInfo"),
    _delete("admin_remove_budget", f"{_ADMIN}/{_BUDGET}"),
    # ---------------------------------------------------------------------------- administrators
    _get("admin_list_users", f"{_ADMIN}/users", "AdminUsersResponse"),
    _get("admin_get_user", _USER, "AdminUser"),
    _post("admin_disable_user", "StopWorkRequest", "StopWorkResponse", f"{_USER}/disable"),
    _post("admin_enable_user", None, None, f"{_USER}/enable"),
    _post("admin_lift_pause", None, None, f"{_USER}/lift_pause"),
    _post("admin_stop_user", "StopWorkRequest", "StopWorkResponse", f"{_USER}/stop"),
    _put("admin_set_quotas", f"{_USER}/quotas", "SetQuotasRequest", "AdminUser", keeps_null=True),
    _get("admin_list_sessions", f"{_ADMIN}/sessions", "AdminSessionsResponse"),
    _post(
        "admin_stop_session",
        "StopWorkRequest",
        "StopWorkResponse",
        f"{_ADMIN}/sessions/{{session_id}}/stop",
    ),
    _get("admin_list_runs", f"{_ADMIN}/runs", "AdminRunsResponse"),
    _post(
        "admin_stop_run", "StopWorkRequest", "StopWorkResponse", f"{_ADMIN}/runs/{{run_id}}/stop"
    ),
    _delete("admin_delete_run", f"{_ADMIN}/runs/{{run_id}}", "DeleteRunResponse"),
    _get("admin_list_keys", f"{_ADMIN}/keys", "AdminKeysResponse"),
    _post("admin_add_key", "AddKeyRequest", "AddKeyResponse", f"{_ADMIN}/keys"),
    _delete("admin_revoke_key", f"{_ADMIN}/keys/{{key_id}}"),
    _get("admin_usage", f"{_ADMIN}/usage", "AdminUsageResponse"),
    _get("admin_audit_log", f"{_ADMIN}/audit", "AdminAuditResponse"),
]

ENDPOINTS: dict[str, Endpoint] = {row.name: row for row in _ROWS}
