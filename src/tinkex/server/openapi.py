"""Request bodies of the hot routes in the OpenAPI document.

Those routes read raw bodies and check them by hand, so FastAPI cannot know their shape. It is
written down here once, for people, generators and the tests that send everything wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
BOOL: Schema = {"type": "boolean"}
FLAG: Schema = {"type": ["boolean", "null"]}
OBJECT: Schema = {"type": "object"}
NUMBER: Schema = {"type": "number", "minimum": 0}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
NUMBERED: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1}
NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
INTEGERS: Schema = {"type": "array", "items": {"type": "integer"}}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }


CHUNK = _object({"tokens": INTEGERS}, type={"const": "encoded_text"})
MODEL_INPUT = _object({"chunks": {"type": "array", "items": CHUNK}})
TENSOR = _object(
    {"data": NUMBERS, "dtype": {"enum": ["float32", "int64"]}},
    shape=_maybe(INTEGERS),
    sparse_crow_indices=_maybe(INTEGERS),
    sparse_col_indices=_maybe(INTEGERS),
)
DATUM = _object(
    {"model_input": MODEL_INPUT},
    loss_fn_inputs={"type": "object", "additionalProperties": TENSOR},
)
LOSS_CONFIG = _maybe({"type": "object", "additionalProperties": {"type": ["number", "string"]}})
TRAIN_INPUT = _object(
    {"data": {"type": "array", "items": DATUM}, "loss_fn": TEXT}, loss_fn_config=LOSS_CONFIG
)
SAMPLING_PARAMS = _object(
    {},
    max_tokens=_maybe({"type": "integer", "minimum": 1, "maximum": 64}),
    seed=_maybe({"type": "integer"}),
    stop=_maybe({"anyOf": [TEXT, {"type": "array", "items": TEXT}, INTEGERS]}),
    temperature=NUMBER,
    top_k={"type": "integer", "minimum": -1},
    top_p={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
)
SAMPLE = _object(
    {"prompt": MODEL_INPUT, "sampling_params": SAMPLING_PARAMS},
    sampling_session_id=_maybe(TEXT),
    base_model=_maybe(TEXT),
    model_path=_maybe(TEXT),
    seq_id=_maybe(COUNT),
    num_samples={"type": "integer", "minimum": 1, "maximum": 8},
    prompt_logprobs=FLAG,
    topk_prompt_logprobs=COUNT,
    topk_sample_logprobs=COUNT,
    prompt_alt_tokens_k=COUNT,
    prompt_logprobs_last_n=_maybe(COUNT),
    target_prompt_logprobs=_maybe(TENSOR),
    record_stability_info=FLAG,
)
ADAM = _object(
    {},
    learning_rate=NUMBER,
    beta1=NUMBER,
    beta2=NUMBER,
    eps=NUMBER,
    weight_decay=NUMBER,
    grad_clip_norm=NUMBER,
)
LORA = _object(
    {"rank": {"type": "integer", "minimum": 1, "maximum": 512}},
    seed=_maybe({"type": "integer"}),
    train_unembed=BOOL,
    train_mlp=BOOL,
    train_attn=BOOL,
)
OPTIMIZER = _maybe(_object({"type": TEXT}))
SAVE: dict[str, Schema] = {
    "path": _maybe(TEXT),
    "seq_id": NUMBERED,
    "ttl_seconds": _maybe(COUNT),
    "user_metadata": _maybe({"type": "object", "additionalProperties": {"type": "string"}}),
}
_MODEL = {"model_id": TEXT}
_SESSION = {"session_id": TEXT}
_REQUEST = {"request_id": TEXT}
_PID = {"pid": {"type": "integer", "minimum": 1, "maximum": 2**31}}
_VERSION = _object({}, sdk_version=TEXT)

BODIES: dict[str, Schema] = {
    "/api/v1/client/config": _VERSION,
    "/api/v1/client/dynamic_config": _VERSION,
    "/api/v1/create_session": _object(
        {"sdk_version": TEXT},
        tags={"type": "array", "items": TEXT},
        user_metadata=_maybe(OBJECT),
        project_id=_maybe(TEXT),
        display_name=_maybe(TEXT),
    ),
    "/api/v1/session_heartbeat": _object(_SESSION),
    "/api/v1/telemetry": _object(
        {"events": {"type": "array", "items": _object({"event": TEXT}, severity=TEXT)}}
    ),
    "/api/v1/create_model": _object(
        {**_SESSION, "base_model": TEXT},
        model_seq_id=COUNT,
        lora_config=LORA,
        optimizer_config=OPTIMIZER,
        user_metadata=_maybe(OBJECT),
    ),
    "/api/v1/forward": _object({**_MODEL, "forward_input": TRAIN_INPUT}, seq_id=NUMBERED),
    "/api/v1/forward_backward": _object(
        {**_MODEL, "forward_backward_input": TRAIN_INPUT}, seq_id=NUMBERED
    ),
    "/api/v1/optim_step": _object(
        _MODEL, seq_id=NUMBERED, adam_params=_maybe(ADAM), optimizer_params=OPTIMIZER
    ),
    "/api/v1/load_weights": _object(
        {"path": TEXT, "optimizer": BOOL},
        model_id=_maybe(TEXT),
        seq_id=NUMBERED,
        session_id=_maybe(TEXT),
        model_seq_id=_maybe(COUNT),
        base_model=_maybe(TEXT),
        optimizer_config=OPTIMIZER,
        user_metadata=_maybe(OBJECT),
        weights_access_token=_maybe(TEXT),
    ),
    "/api/v1/save_weights": _object(_MODEL, overwrite=FLAG, **SAVE),
    "/api/v1/save_weights_for_sampler": _object(
        _MODEL, sampling_session_seq_id=_maybe(COUNT), **SAVE
    ),
    "/api/v1/save_weights_external": _object(
        _MODEL,
        age_encryption_recipients=_maybe({"type": "array", "items": TEXT}),
        **SAVE,
    ),
    "/api/v1/create_custom_loss": _object(
        {
            **_SESSION,
            "custom_loss_seq_id": COUNT,
            "name": TEXT,
            "inputs": {
                "type": "array",
                "items": _object({"name": TEXT, "rank": {"enum": [0, 1, 2]}}),
            },
            "graph": _object({"nodes": {"type": "array", "items": OBJECT}}, format={"const": 1}),
        }
    ),
    "/api/v1/get_info": _object(_MODEL),
    "/api/v1/unload_model": _object(_MODEL),
    "/api/v1/retrieve_future": _object(_REQUEST, allow_metadata_only=FLAG),
    "/api/v1/cancel_future": _object(_REQUEST),
    "/api/v1/retrieve_futures": _object(
        {
            "target": _object(
                {"sampling_session_id": TEXT},
                type={"const": "sampling_session"},
                cloned_sampler_id=COUNT,
            )
        },
        prev_cursor=COUNT,
        retrieved_request_ids={"type": "array", "items": TEXT},
        timeout=_maybe({"type": "number", "minimum": 0, "maximum": 0.1}),
        inline_results=FLAG,
    ),
    "/api/v1/create_sampling_session": _object(
        _SESSION,
        sampling_session_seq_id=COUNT,
        base_model=_maybe(TEXT),
        model_path=_maybe(TEXT),
    ),
    "/api/v1/join_sampling_session": _object({"sampling_session_id": TEXT}),
    "/api/v1/asample": SAMPLE,
    "/api/v1/asample_batch": _object({"requests": {"type": "array", "items": SAMPLE}}),
    "/api/v1/sample_stream": SAMPLE,
    "/tinkex/v1/attach": _object(_PID),
    "/tinkex/v1/detach": _object(_PID),
}


def install(app: FastAPI) -> None:
    """Add the bodies to the document that `app.openapi()` gives."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        for path, schema in BODIES.items():
            operation = document["paths"][path]["post"]
            content: dict[str, Any] = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        return document

    app.openapi = openapi  # type: ignore[method-assign]
