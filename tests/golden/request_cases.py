"""The requests that are recorded from the official SDKs and replayed with ours.

What carries prompts and tensors is in `data_cases.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import data_cases
from case_values import TIME, UNICODE, Build, Cases

# Endpoint -> (class, required fields, optional fields with a value worth sending). The optional
# ones go in one at a time, then all together.
_BOTH: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "create_session": (
        "CreateSessionRequest",
        {"tags": ["a", UNICODE], "user_metadata": {"k": "v", "n": 1}, "sdk_version": "1.2.3"},
        {"type": "create_session"},
    ),
    "create_sampling_session": (
        "CreateSamplingSessionRequest",
        {"session_id": "S", "sampling_session_seq_id": 3},
        {"base_model": "m", "model_path": "tinker://r/sampler_weights/x"},
    ),
    "get_info": ("GetInfoRequest", {"model_id": "S:train:0"}, {"type": "get_info"}),
    "save_weights": (
        "SaveWeightsRequest",
        {"model_id": "S:train:0"},
        {"path": "step-1", "seq_id": 7},
    ),
    "save_weights_for_sampler": (
        "SaveWeightsForSamplerRequest",
        {"model_id": "S:train:0"},
        {"path": "step-1", "seq_id": 7, "sampling_session_seq_id": 2},
    ),
}
_NEW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "client_config": ("ClientConfigRequest", {"sdk_version": "0.36.0"}, {}),
    "client_dynamic_config": ("ClientConfigRequest", {"sdk_version": "0.36.0"}, {}),
    "copy_weights": (
        "CopyWeightsRequest",
        {"source_path": "tinker://r/weights/x"},
        {
            "destination_project_id": "p",
            "ttl_seconds": 3600,
            "session_id": "S",
            "model_seq_id": 1,
            "weights_access_token": "t",
        },
    ),
    "create_session": (
        "CreateSessionRequest",
        {"tags": [], "user_metadata": {}, "sdk_version": "1.2.3"},
        {"project_id": "p", "display_name": UNICODE},
    ),
    "join_sampling_session": ("JoinSamplingSessionRequest", {"sampling_session_id": "S:0"}, {}),
    "load_weights": (
        "LoadWeightsRequest",
        {"path": "tinker://r/weights/x", "optimizer": True},
        {
            "model_id": "S:train:0",
            "seq_id": 4,
            "session_id": "S",
            "model_seq_id": 1,
            "base_model": "m",
            "user_metadata": {"a": None, "b": [1, None]},
            "weights_access_token": "t",
        },
    ),
    "retrieve_future": (
        "FutureRetrieveRequest",
        {"request_id": "r1"},
        {"allow_metadata_only": True},
    ),
    "save_weights": (
        "SaveWeightsRequest",
        {"model_id": "S:train:0"},
        {"ttl_seconds": 3600, "overwrite": True, "user_metadata": {"k": "v"}},
    ),
    "save_weights_external": (
        "SaveWeightsExternalRequest",
        {"model_id": "S:train:0", "path": "x"},
        {"seq_id": 9, "ttl_seconds": 3600, "age_encryption_recipients": ["age1x", "age1y"]},
    ),
    "save_weights_for_sampler": (
        "SaveWeightsForSamplerRequest",
        {"model_id": "S:train:0", "path": "x"},
        {"ttl_seconds": 3600, "user_metadata": {"k": "v"}},
    ),
}
_OLD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "load_weights": (
        "LoadWeightsRequest",
        {"model_id": "S:train:0", "path": "tinker://r/weights/x"},
        {"seq_id": 4, "type": "load_weights"},
    ),
    "retrieve_future": ("FutureRetrieveRequest", {"request_id": "r1"}, {}),
    "unload_model": ("UnloadModelRequest", {"model_id": "S:train:0"}, {"type": "unload_model"}),
}


def requests(sdk: str) -> Cases:
    """(case, endpoint, builder) for every request the given SDK version can send."""
    old = sdk == "0.4.1"
    for table in (_BOTH, _OLD if old else _NEW):
        for endpoint, (kind, required, optional) in table.items():
            for label, fields in _in_turn(required, optional):
                yield f"{endpoint}/{kind}/{label}", endpoint, _plain(kind, fields)
    yield from _create_model(old)
    yield from _optim_step(old)
    yield from data_cases.samples(old)
    yield from data_cases.passes(old)
    yield from _telemetry(old)
    yield (
        "session_heartbeat",
        "session_heartbeat",
        lambda t: t.SessionHeartbeatRequest(session_id="S"),
    )
    if not old:
        yield from _graphs()
        yield from _futures()
        yield from _search()


def _in_turn(
    required: dict[str, Any], optional: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    label = "+".join(sorted(optional)) or "all"
    yield f"minimal-of-{label}", required
    for name, value in optional.items():
        yield f"{name}", required | {name: value}
        yield f"{name}-none", required | ({name: None} if name not in _NEVER_NONE else {})
    yield f"every-of-{label}", required | optional


_NEVER_NONE = frozenset({"type", "overwrite", "allow_metadata_only"})


def _plain(kind: str, fields: dict[str, Any]) -> Build:
    return lambda t: getattr(t, kind)(**fields)


def _create_model(old: bool) -> Cases:
    base = {"session_id": "S", "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
    loras: dict[str, dict[str, Any]] = {
        "rank": {"rank": 8},
        "seed": {"rank": 8, "seed": 2**62},
        "flags": {"rank": 8, "train_mlp": False, "train_attn": True, "train_unembed": False},
    }
    for label, lora in loras.items():
        yield (
            f"create_model/lora-{label}",
            "create_model",
            lambda t, lora=lora: t.CreateModelRequest(**base, lora_config=t.LoraConfig(**lora)),
        )
    yield (
        "create_model/metadata",
        "create_model",
        lambda t: t.CreateModelRequest(**base, user_metadata={"x": UNICODE, "y": None, "z": 1.5}),
    )
    if old:
        return
    yield (
        "create_model/dimuon",
        "create_model",
        lambda t: t.CreateModelRequest(**base, optimizer_config=t.DimuonOptimizerConfig()),
    )
    yield (
        "create_model/adamw",
        "create_model",
        lambda t: t.CreateModelRequest(**base, optimizer_config=t.AdamOptimizerConfig()),
    )


def _optim_step(old: bool) -> Cases:
    values = {"learning_rate": 1e-5, "beta1": 0.85, "beta2": 0.999, "eps": 1e-8}
    if not old:
        values |= {"weight_decay": 0.1, "grad_clip_norm": 1.0}
    adams = [{}, *({name: value} for name, value in values.items()), values]
    for adam in adams:
        label = "+".join(adam) or "defaults"
        yield (
            f"optim_step/adam-{label}",
            "optim_step",
            lambda t, adam=adam: t.OptimStepRequest(
                adam_params=t.AdamParams(**adam), model_id="S:train:0", seq_id=2
            ),
        )
    yield (
        "optim_step/no-seq-id",
        "optim_step",
        lambda t: t.OptimStepRequest(adam_params=t.AdamParams(), model_id="S:train:0"),
    )
    if not old:
        yield (
            "optim_step/dimuon",
            "optim_step",
            lambda t: t.OptimStepRequest(
                optim_params=t.DimuonParams(learning_rate=1e-3, beta1=0.5), model_id="m", seq_id=1
            ),
        )


def _telemetry(old: bool) -> Cases:
    common = {"event_id": "e", "event_session_index": 3, "severity": "INFO", "timestamp": TIME}
    events: dict[str, Build] = {
        "start": lambda t: t.SessionStartEvent(event="SESSION_START", **common),
        "end": lambda t: t.SessionEndEvent(event="SESSION_END", duration="0:00:01.5", **common),
        "exception": lambda t: t.UnhandledExceptionEvent(
            event="UNHANDLED_EXCEPTION",
            error_type="ValueError",
            error_message=UNICODE,
            traceback="a\nb",
            **common,
        ),
        "exception-short": lambda t: t.UnhandledExceptionEvent(
            event="UNHANDLED_EXCEPTION", error_type="E", error_message="", **common
        ),
        "generic": lambda t: t.GenericEvent(
            event="GENERIC_EVENT", event_name="n", event_data={"a": [1, None, UNICODE]}, **common
        ),
        "generic-bare": lambda t: t.GenericEvent(event="GENERIC_EVENT", event_name="", **common),
    }
    for label, event in events.items():
        yield (
            f"telemetry/{label}",
            "telemetry",
            lambda t, event=event: t.TelemetrySendRequest(
                events=[event(t)],
                platform="Linux",
                sdk_version="1",
                session_id="S",
                **({} if old else {"process_uuid": "u"}),
            ),
        )


def _graphs() -> Cases:
    def build(t: Any) -> Any:
        nodes = [
            t.CustomLossNode(op="placeholder", name="logprobs", target="logprobs"),
            t.CustomLossNode(
                op="call_function",
                name="mul",
                target="operator.mul",
                args=[{"ref": "logprobs"}, 2.5, {"float": "inf"}, {"slice": [None, 1, None]}],
                kwargs={"dim": None, "dtype": {"dtype": "float32"}},
            ),
        ]
        return t.CreateCustomLossRequest(
            session_id="S",
            custom_loss_seq_id=0,
            name="f",
            inputs=[t.CustomLossInput(name="logprobs", rank=1)],
            graph=t.CustomLossGraph(nodes=nodes),
        )

    yield "create_custom_loss/graph", "create_custom_loss", build


def _futures() -> Cases:
    variants: dict[str, dict[str, Any]] = {
        "minimal": {},
        "cursor": {"prev_cursor": 2**40},
        "timeout": {"timeout": 1.5},
        "retrieved": {"retrieved_request_ids": ["a", "b"]},
    }
    for label, fields in variants.items():
        yield (
            f"retrieve_futures/{label}",
            "retrieve_futures",
            lambda t, fields=fields: t.FuturesRetrieveRequest(
                target=t.SamplingSessionFuturesTarget(sampling_session_id="S:sample:0"), **fields
            ),
        )


def _search() -> Cases:
    variants: dict[str, Build] = {
        "minimal": lambda t: {},
        "session": lambda t: {"session_id": "S"},
        "projects": lambda t: {"project_ids": ["p"]},
        "metadata": lambda t: {"user_metadata": {"k": UNICODE}},
        "name": lambda t: {"display_name": "x"},
        "accessible": lambda t: {"owner": t.AccessibleSearchOwner()},
        "user": lambda t: {"owner": t.UserSearchOwner(owner_urns=["u"])},
        "statuses": lambda t: {
            "statuses": [
                t.ActiveSessionStatusQuery(),
                t.ClientFinishedSessionStatusQuery(reasons=["success"]),
                t.FailedSessionStatusQuery(),
            ]
        },
        "limit": lambda t: {"limit": 200},
    }
    for label, fields in variants.items():
        yield (
            f"search_sessions/{label}",
            "search_sessions",
            lambda t, fields=fields: t.SessionSearchRequest(**fields(t)),
        )
