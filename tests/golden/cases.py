"""The requests and results that are recorded from the official SDKs and replayed with ours.

Each builder takes a `types` module - the official one when recording, ours when testing - so that
both build the same value from the same code. This file imports neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

Build = Callable[[Any], Any]
TIME = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
UNICODE = 'naïve 東京 🙂 \u2028 " \\ \n'
PNG = bytes(range(256)) * 3

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


def requests(sdk: str) -> Iterator[tuple[str, str, Build]]:
    """(case, endpoint, builder) for every request the given SDK version can send."""
    old = sdk == "0.4.1"
    for table in (_BOTH, _OLD if old else _NEW):
        for endpoint, (kind, required, optional) in table.items():
            for label, fields in _in_turn(required, optional):
                yield f"{endpoint}/{kind}/{label}", endpoint, _plain(kind, fields)
    yield from _create_model(old)
    yield from _optim_step(old)
    yield from _sample(old)
    yield from _targets(old)
    yield from _passes(old)
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


def _create_model(old: bool) -> Iterator[tuple[str, str, Build]]:
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


def _optim_step(old: bool) -> Iterator[tuple[str, str, Build]]:
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


def _prompts(old: bool) -> dict[str, Build]:
    size: dict[str, Any] = (
        {"height": 10, "width": 20, "tokens": 5} if old else {"expected_tokens": 5}
    )
    prompts: dict[str, Build] = {
        "text": lambda t: t.ModelInput.from_ints([1, 2, 3]),
        "empty": lambda t: t.ModelInput.empty(),
        "no-tokens": lambda t: t.ModelInput.from_ints([]),
        "huge-ids": lambda t: t.ModelInput.from_ints([0, 2**31 - 1]),
        "typed": lambda t: t.ModelInput(
            chunks=[t.EncodedTextChunk(tokens=[1], type="encoded_text")]
        ),
        "appended": lambda t: t.ModelInput.from_ints([1]).append(t.EncodedTextChunk(tokens=[2])),
        "image": lambda t: t.ModelInput(
            chunks=[t.EncodedTextChunk(tokens=[1]), t.ImageChunk(data=PNG, format="png", **size)]
        ),
        "pointer": lambda t: t.ModelInput(
            chunks=[t.ImageAssetPointerChunk(format="jpeg", location=f"s3://{UNICODE}", **size)]
        ),
    }
    if not old:
        prompts["image-no-size"] = lambda t: t.ModelInput(
            chunks=[t.ImageChunk(data=b"", format="jpeg")]
        )
        prompts["dmel"] = lambda t: t.ModelInput(chunks=[t.DmelChunk(dmel=b"\x00\x02\x07\x50")])
    return prompts


def _sample(old: bool) -> Iterator[tuple[str, str, Build]]:
    for label, prompt in _prompts(old).items():
        yield (
            f"asample/prompt-{label}",
            "asample",
            lambda t, prompt=prompt: t.SampleRequest(
                prompt=prompt(t), sampling_params=t.SamplingParams()
            ),
        )
    params: dict[str, Any] = {
        "max_tokens": 16,
        "seed": 2**31,
        "stop": [1, 2],
        "temperature": 0.0,
        "top_k": 5,
        "top_p": 0.9,
    }
    stops: dict[str, Any] = {"stop-text": UNICODE, "stop-texts": ["a", "b"], "stop-none": []}
    variants = [{name: value} for name, value in params.items()]
    variants += [{"stop": value} for value in stops.values()] + [params]
    for index, fields in enumerate(variants):
        yield (
            f"asample/params-{index}-{'+'.join(fields)}",
            "asample",
            lambda t, fields=fields: t.SampleRequest(
                prompt=t.ModelInput.from_ints([1, 2]), sampling_params=t.SamplingParams(**fields)
            ),
        )
    optional: dict[str, Any] = {
        "num_samples": 4,
        "base_model": "m",
        "model_path": "tinker://r/sampler_weights/x",
        "sampling_session_id": "S:sample:0",
        "seq_id": 2**40,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
    }
    if not old:
        optional |= {
            "topk_sample_logprobs": 2,
            "prompt_alt_tokens_k": 4,
            "prompt_logprobs_last_n": 7,
            "record_stability_info": True,
        }
    turns = [{name: value} for name, value in optional.items()]
    turns += [{"prompt_logprobs": False}, {"prompt_logprobs": None}, optional]
    for index, fields in enumerate(turns):
        yield (
            f"asample/field-{index}-{'+'.join(fields)}",
            "asample",
            lambda t, fields=fields: t.SampleRequest(
                prompt=t.ModelInput.from_ints([1, 2]),
                sampling_params=t.SamplingParams(max_tokens=1),
                **fields,
            ),
        )


def _targets(old: bool) -> Iterator[tuple[str, str, Build]]:
    if old:
        return
    tensors: dict[str, dict[str, Any]] = {
        "dense": {"data": [5, -1], "dtype": "int64", "shape": [2, 1]},
        "sparse": {
            "data": [5],
            "dtype": "int64",
            "shape": [2, 9],
            "sparse_crow_indices": [0, 0, 1],
            "sparse_col_indices": [8],
        },
    }
    for label, fields in tensors.items():
        yield (
            f"asample/targets-{label}",
            "asample",
            lambda t, fields=fields: t.SampleRequest(
                prompt=t.ModelInput.from_ints([1, 2, 3]),
                sampling_params=t.SamplingParams(),
                target_prompt_logprobs=fields,
            ),
        )


def _tensor_inputs(old: bool) -> dict[str, Build]:
    """Loss inputs in every form a caller may give."""
    inputs: dict[str, Build] = {
        "lists": lambda t: {"target_tokens": [2, 3, 4], "weights": [0.1, 0, 1]},
        "one-list": lambda t: {"target_tokens": [2, 3, 2**40]},
        "tensor": lambda t: {"x": t.TensorData(data=[1.5, -2.25], dtype="float32")},
        "tensor-shape": lambda t: {"x": t.TensorData(data=[1, 2], dtype="int64", shape=[2, 1])},
        "negative": lambda t: {"advantages": [-1.5, 1e-30, 3.0e38]},
        "empty": lambda t: {},
    }
    if not old:
        inputs |= {
            "sparse": lambda t: {
                "weights": t.TensorData(
                    data=[1.0, 2.0],
                    dtype="float32",
                    shape=[3, 4],
                    sparse_crow_indices=[0, 1, 2, 2],
                    sparse_col_indices=[0, 3],
                )
            },
            "nested": lambda t: {"target_tokens": [[1, 2], [3, 4]]},
            "empty-list": lambda t: {"weights": []},
        }
    return inputs


def array_inputs(old: bool) -> dict[str, Callable[[Any, Any, Any], dict[str, Any]]]:
    """Loss inputs from numpy and torch: builders of (types, numpy, torch)."""
    inputs: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
        "numpy-float": lambda t, np, torch: {"weights": np.array([0.1, 2], np.float32)},
        "numpy-double": lambda t, np, torch: {"weights": np.array([0.1, 2.0])},
        "numpy-int": lambda t, np, torch: {"target_tokens": np.array([1, 2], np.int32)},
        "torch-float": lambda t, np, torch: {"weights": torch.tensor([0.1, 2.0])},
        "torch-int": lambda t, np, torch: {"target_tokens": torch.tensor([1, 2])},
    }
    if not old:
        inputs["torch-bf16"] = lambda t, np, torch: {
            "advantages": torch.tensor([0.5, 2.0], dtype=torch.bfloat16)
        }
        inputs["torch-2d-sparse"] = lambda t, np, torch: {
            "weights": torch.zeros(8, 8).index_put_((torch.tensor([3]),), torch.tensor(1.5))
        }
        inputs["torch-2d-dense"] = lambda t, np, torch: {"weights": torch.ones(2, 2)}
        inputs["numpy-2d"] = lambda t, np, torch: {"logprobs": np.zeros((2, 3), np.float32)}
    return inputs


def _passes(old: bool) -> Iterator[tuple[str, str, Build]]:
    def one(t: Any, datum: Any, **fields: Any) -> Any:
        config = {k: v for k, v in fields.items() if k == "loss_fn_config"}
        rest = {k: v for k, v in fields.items() if k != "loss_fn_config"}
        loss_fn = rest.pop("loss_fn", "cross_entropy")
        given = t.ForwardBackwardInput(data=datum, loss_fn=loss_fn, **config)
        return t.ForwardBackwardRequest(
            forward_backward_input=given, **{"model_id": "S:train:0", "seq_id": 1, **rest}
        )

    def simple(t: Any) -> Any:
        return t.Datum(model_input=t.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={})

    for label, inputs in _tensor_inputs(old).items():
        yield (
            f"forward_backward/inputs-{label}",
            "forward_backward",
            lambda t, inputs=inputs: one(
                t, [t.Datum(model_input=t.ModelInput.from_ints([1]), loss_fn_inputs=inputs(t))]
            ),
        )
    for label, arrays in array_inputs(old).items():
        yield (
            f"forward_backward/inputs-{label}",
            "forward_backward",
            lambda t, arrays=arrays: one(
                t,
                [
                    t.Datum(
                        model_input=t.ModelInput.from_ints([1]),
                        loss_fn_inputs=arrays(t, *_array_modules()),
                    )
                ],
            ),
        )
    for label, prompt in _prompts(old).items():
        if label == "pointer" and not old:
            continue  # not encodable, as the contract says
        yield (
            f"forward_backward/input-{label}",
            "forward_backward",
            lambda t, prompt=prompt: one(t, [t.Datum(model_input=prompt(t), loss_fn_inputs={})]),
        )
    configs: dict[str, Any] = {"number": {"beta": 0.25}, "zero": {"clip": 0.0}, "none": None}
    if not old:
        configs |= {"text": {"loss_id": UNICODE}, "empty-text": {"loss_id": ""}}
    for label, config in configs.items():
        yield (
            f"forward_backward/config-{label}",
            "forward_backward",
            lambda t, config=config: one(t, [simple(t)], loss_fn="ppo", loss_fn_config=config),
        )
    yield (
        "forward_backward/no-seq-id",
        "forward_backward",
        lambda t: one(t, [simple(t)], seq_id=None),
    )
    yield (
        "forward_backward/many",
        "forward_backward",
        lambda t: one(t, [simple(t) for _ in range(200)], seq_id=2**31 - 1, model_id=UNICODE),
    )
    yield (
        "forward_backward/long",
        "forward_backward",
        lambda t: (
            one(t, [t.Datum(model_input=t.ModelInput.from_ints(list(range(40_000))))])
            if not old
            else one(
                t,
                [
                    t.Datum(
                        model_input=t.ModelInput.from_ints(list(range(40_000))), loss_fn_inputs={}
                    )
                ],
            )
        ),
    )
    if old:
        yield (
            "forward/simple",
            "forward",
            lambda t: t.ForwardRequest(
                forward_input=t.ForwardBackwardInput(data=[simple(t)], loss_fn="cross_entropy"),
                model_id="S:train:0",
                seq_id=3,
            ),
        )
        return
    yield from _provenance(one)


def _provenance(one: Any) -> Iterator[tuple[str, str, Build]]:
    def build(t: Any) -> Any:
        datum = t.Datum(
            model_input=t.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4]},
        )
        prompt = t.PromptProvenanceSpan(sequence_id="s", offset=300, length=2)
        sampled = t.SampledProvenanceSpan(sequence_id=UNICODE, length=1)
        return one(
            t,
            [
                datum.with_provenance(
                    model_input=[prompt, sampled],
                    loss_fn_inputs=[t.SampledProvenanceSpan(sequence_id="s", offset=0, length=3)],
                )
            ],
        )

    yield "forward_backward/provenance", "forward_backward", build


def _array_modules() -> tuple[Any, Any]:
    import numpy
    import torch

    return numpy, torch


def _telemetry(old: bool) -> Iterator[tuple[str, str, Build]]:
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


def _graphs() -> Iterator[tuple[str, str, Build]]:
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


def _futures() -> Iterator[tuple[str, str, Build]]:
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


def _search() -> Iterator[tuple[str, str, Build]]:
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


# ------------------------------------------------------------------------------------ results

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


NAN = math.nan
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
