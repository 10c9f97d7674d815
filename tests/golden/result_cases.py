"""The results that are recorded from the official SDKs and read with ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from case_values import TIME, UNICODE

_CHECKPOINT = {
    "checkpoint_id": "weights/x",
    "checkpoint_type": "training",
    "time": TIME,
    "tinker_path": "tinker://r/weights/x",
}
_RUN = {
    "training_run_id": "r",
    "base_model": "m",
    "model_owner": "o",
    "is_lora": True,
    "last_request_time": TIME,
}
_CURSOR = {"offset": 0, "limit": 20, "total_count": 1}
_STORAGE_ITEM = {"checkpoint_count": 1, "size_bytes": 2**40, "size_gigabytes": 1.5}
_BUCKET = {"bucket_start": TIME, "bucket_end": TIME}
_SUMMARY = {
    "session_id": "S",
    "created_at": TIME,
    "owner": "o",
    "project_id": "p",
    "checkpoints_count": 0,
}

# Class -> (fields that both SDKs know, fields only 0.36 knows). None means: not in 0.4.1.
RESULTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "AuditLogResponse": (
        None,
        {
            "entries": [
                {"timestamp": TIME, "event": "checkpoint_delete", "event_details": {"a": [None]}},
                {"timestamp": TIME, "event": "x", "model_id": "m", "purpose": UNICODE},
            ]
        },
    ),
    "AuthTokenResponse": (None, {"jwt": "eyJx"}),
    "BillingUsageResponse": (
        None,
        {
            "data": [
                _BUCKET | {"event_info": {"type": "training", "token_count": 5}},
                _BUCKET
                | {
                    "event_info": {"type": "sampling_prefill", "cached": True, "token_count": 5},
                    "base_model": "m",
                    "estimated_cost_usd": 0.1,
                },
                _BUCKET | {"event_info": {"type": "sampling_sample", "token_count": 5}},
                _BUCKET | {"event_info": {"type": "checkpoint", "count": 2}},
                _BUCKET | {"event_info": {"type": "storage", "gigabyte_hours": 1.5}},
            ],
            "sessions": {"S": {"user_metadata": {"k": "v"}}, "T": {}},
            "cost_data_through": TIME,
        },
    ),
    "CheckpointsListResponse": (
        {"checkpoints": [_CHECKPOINT], "cursor": _CURSOR},
        {"checkpoints": [_CHECKPOINT | {"expires_at": TIME, "user_metadata": {"k": "v"}}]},
    ),
    "ClientConfigResponse": (None, {"pjwt_auth_enabled": True, "fwdbwd_max_chunk_len": 7}),
    "ClientDynamicConfigResponse": (None, {"refresh_interval_sec": 10}),
    "CopyWeightsResponse": (None, {"tinker_path": "tinker://r/weights/x"}),
    "CreateCustomLossResponse": (None, {"loss_id": "l"}),
    "CreateModelResponse": ({"model_id": "S:train:0"}, {}),
    "CreateSamplingSessionResponse": ({"sampling_session_id": "S:sample:0"}, {}),
    "CreateSessionResponse": (
        {"session_id": "S", "info_message": UNICODE, "warning_message": "w", "error_message": "e"},
        {},
    ),
    "CurrentCheckpointStorageUsageResponse": (
        None,
        {
            "effective_rate_usd_per_gigabyte_month": 0.02,
            "data": [_STORAGE_ITEM, _STORAGE_ITEM | {"user_email": "a@b", "project_id": "p"}],
        },
    ),
    "ExternalWeightsUrlsResponse": (None, {"urls": {"a/b": "https://x"}, "expires": TIME}),
    "FuturesRetrieveResponse": (
        None,
        {
            "completions": [
                {
                    "state": "finished",
                    "request_id": "a",
                    "response_payload_uncompressed_size": 5,
                },
                {"state": "failed", "request_id": "b"},
            ],
            "cursor": 2**40,
        },
    ),
    "GetInfoResponse": (
        {
            "model_id": "S:train:0",
            "model_data": {"arch": "a", "model_name": "m", "tokenizer_id": "t:v"},
            "is_lora": True,
            "lora_rank": 8,
            "model_name": "m",
        },
        {"optimizer_config": {"type": "other", "field": 1}},
    ),
    "GetSamplerResponse": (None, {"sampler_id": "s", "base_model": "m", "model_path": "p"}),
    "GetServerCapabilitiesResponse": (
        {"supported_models": [{"model_name": "m"}, {}]},
        {"supported_models": [{"model_name": "m", "max_context_length": 8, "trainable": True}]},
    ),
    "GetSessionResponse": (
        None,
        {"training_run_ids": ["r"], "sampler_ids": [], "user_metadata": {"k": "v"}},
    ),
    "HealthResponse": ({"status": "ok"}, {}),
    "JoinSamplingSessionResponse": (None, {"client_counter": 3}),
    "ListSessionsResponse": (None, {"sessions": ["a", "b"]}),
    "LoadWeightsResponse": ({"path": "p"}, {"model_id": "S:train:1"}),
    "OptimStepResponse": ({"metrics": {"grad_norm": 1.5, "x:mean": 1e-30, "i": 2}}, {}),
    "RequestFailedResponse": ({"error": UNICODE, "category": "user"}, {}),
    "SaveWeightsExternalResponse": (None, {"path": "p"}),
    "SaveWeightsExternalResponseInternal": (None, {"path": "p", "size_bytes": 2**40}),
    "SaveWeightsForSamplerResponse": ({"path": "p"}, {}),
    "SaveWeightsForSamplerResponseInternal": ({"sampling_session_id": "S:sample:0"}, {}),
    "SaveWeightsResponse": ({"path": "tinker://r/weights/x"}, {}),
    "SessionHeartbeatResponse": ({}, {}),
    "SessionSearchResponse": (
        None,
        {
            "sessions": [
                _SUMMARY | {"status": {"type": "active"}},
                _SUMMARY | {"status": {"type": "cancelled", "detail": "d"}},
                _SUMMARY | {"status": {"type": "client_finished", "reason": {"type": "success"}}},
                _SUMMARY
                | {
                    "status": {
                        "type": "failed",
                        "category": "user",
                        "message": UNICODE,
                        "reason": {"type": "request", "request_id": "r", "request_type": "t"},
                    }
                },
            ],
            "next_cursor": {"last_created_at": TIME, "last_session_id": "S"},
        },
    ),
    "TelemetryResponse": ({"status": "accepted"}, {}),
    "TrainingRunsResponse": (
        {"training_runs": [_RUN | {"last_checkpoint": _CHECKPOINT}], "cursor": _CURSOR},
        {"training_runs": [_RUN | {"user_metadata": {"k": "v"}, "lora_rank": 8}]},
    ),
    "UnloadModelResponse": ({"model_id": "S:train:0"}, {}),
    "UntypedAPIFuture": ({"request_id": "r"}, {"sample_sequence_ids": ["a", "b"]}),
    "WeightsInfoResponse": (None, {"base_model": "m", "is_lora": True, "train_mlp": False}),
    "WhoamiResponse": (None, {"user_urn": "u", "org_urn": "o", "email": "a@b"}),
}


def results(sdk: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(class name, fields) for every JSON result the given SDK version knows."""
    for kind, (both, new) in RESULTS.items():
        if sdk != "0.4.1":
            yield kind, (both or {}) | new
        elif both is not None:
            yield kind, both


SAMPLE_V04: dict[str, Any] = {
    "sequences": [
        {"stop_reason": "length", "tokens": [1, 2], "logprobs": [-0.5, -1.25]},
        {"stop_reason": "stop", "tokens": []},
    ],
    "prompt_logprobs": [None, -0.75],
    "topk_prompt_logprobs": [None, [(5, -0.5), (6, -1.0)]],
}
PASS_V04: dict[str, Any] = {
    "loss_fn_output_type": "ArrayRecord",
    "loss_fn_outputs": [
        {"logprobs": {"data": [-0.5, -1.25], "dtype": "float32", "shape": [2]}},
        {"logprobs": {"data": [], "dtype": "float32", "shape": [0]}},
    ],
    "metrics": {"loss:sum": 1.5, "n:max": 3},
}
