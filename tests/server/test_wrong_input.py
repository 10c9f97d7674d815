"""Each field of each request is made wrong in turn: a 4xx with the one error body, never a 5xx.

After every wrong training request the same model takes a good one: a refused request consumes its
number and changes nothing else. The protobuf body has its own tests.
A plain run tries every third wrong value per field, a slow run all of them.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from app_world import AppWorld
from wrong_values import wrong_versions

from tinkex.wire import tinker_public_pb2 as pb

both = pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
CHUNK = {"type": "encoded_text", "tokens": [1, 2, 3]}
TENSOR = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
WEIGHTS = {"data": [1.0, 1.0, 1.0], "dtype": "float32", "shape": [3]}
DATUM = {
    "model_input": {"chunks": [CHUNK]},
    "loss_fn_inputs": {"target_tokens": TENSOR, "weights": WEIGHTS},
}
INPUT = {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": {"a": 1.0}}
ADAM = {
    "learning_rate": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
NUMBERED: dict[str, dict[str, Any]] = {
    "forward_backward": {"forward_backward_input": INPUT, "type": "forward_backward"},
    "forward": {"forward_input": INPUT, "type": "forward"},
    "optim_step": {"adam_params": ADAM, "type": "optim_step"},
    "save_weights": {
        "path": "a",
        "ttl_seconds": 3600,
        "overwrite": False,
        "user_metadata": {"k": "v"},
    },
    "save_weights_for_sampler": {"path": "a", "ttl_seconds": 3600, "user_metadata": {"k": "v"}},
    "save_weights_external": {"path": "a", "ttl_seconds": 3600},
    "load_weights": {
        "path": "tinker://x:train:0/weights/a",
        "optimizer": True,
        "weights_access_token": "eyJ.a.b",
    },
}
SAMPLE = {
    "num_samples": 1,
    "prompt": {"chunks": [CHUNK]},
    "sampling_params": {
        "max_tokens": 2,
        "seed": 1,
        "stop": ["x"],
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    },
    "seq_id": 0,
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 1,
    "topk_sample_logprobs": 1,
    "prompt_alt_tokens_k": 0,
    "prompt_logprobs_last_n": 1,
    "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
    "record_stability_info": False,
    "type": "sample",
}


def check(answer: httpx.Response, what: str) -> None:
    """Either a success, or a refusal in the one shape."""
    assert answer.status_code < 500, f"{what}: {answer.text}"
    if answer.status_code >= 400:
        assert answer.status_code != 422, what
        assert int(answer.headers["content-length"]) == len(answer.content) > 0, what
        body = answer.json()
        assert body["detail"], what
        assert body["category"] == "user", f"{what}: {body}"


async def check_promise(world: AppWorld, answer: httpx.Response, what: str) -> None:
    """A promise that was given must not end in a failure of ours."""
    check(answer, what)
    if answer.status_code == 200 and "request_id" in answer.json():
        result = await world.result(answer.json())
        if isinstance(result, dict) and "error" in result:
            assert result["category"] == "user", f"{what}: {result}"


@both
@pytest.mark.parametrize("route", list(NUMBERED))
async def test_a_wrong_field_is_refused_and_the_model_goes_on(
    app_world: AppWorld, route: str, thorough: bool
) -> None:
    session = await app_world.session()
    for number, (what, body) in enumerate(wrong_versions(NUMBERED[route], thorough)):
        model = await app_world.model(session, number)
        body |= {"model_id": model, "seq_id": 1}
        await check_promise(app_world, await app_world.post(route, body), f"{route} {what}")
        after = await app_world.result((await app_world.step(model, 2)).json())
        assert "error" not in after, f"{route} {what}: the model is stuck: {after}"


async def test_a_wrong_address_is_refused(app_world: AppWorld) -> None:
    session = await app_world.session()
    model = await app_world.model(session)
    for route, rest in NUMBERED.items():
        for what, body in wrong_versions({"model_id": model, "seq_id": 1}):
            if "seq_id = 1" in what:
                continue
            answer = await app_world.post(route, rest | body)
            check(answer, f"{route} {what}")
    fresh = await app_world.model(session, 1)
    assert "error" not in await app_world.result((await app_world.step(fresh, 1)).json())


@both
@pytest.mark.parametrize("route", ["asample", "asample_batch"])
async def test_a_wrong_sample_is_refused_and_the_sampler_goes_on(
    app_world: AppWorld, route: str, thorough: bool
) -> None:
    session = await app_world.session()
    made = await app_world.ok(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"},
    )
    address = {"sampling_session_id": made["sampling_session_id"]}
    for number, (what, body) in enumerate(wrong_versions(SAMPLE | address, thorough)):
        if "seq_id" in body and "seq_id" not in what.split(" ")[0]:
            body["seq_id"] = number
        sent = body if route == "asample" else {"requests": [body]}
        answer = await app_world.post(route, sent)
        if route == "asample":
            await check_promise(app_world, answer, what)
        else:
            check(answer, what)
    good = {**SAMPLE, **address, "seq_id": 10**6}
    result = await app_world.result(await app_world.ok("asample", good))
    assert len(pb.SampleResponse.FromString(result).sequences) == 1


@both
async def test_every_other_request_survives_wrong_fields(
    app_world: AppWorld, thorough: bool
) -> None:
    session = await app_world.session()
    model = await app_world.model(session)
    node = {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}
    bodies: dict[str, dict[str, Any]] = {
        "client/config": {"sdk_version": "0.36.0"},
        "client/dynamic_config": {"sdk_version": "0.36.0"},
        "create_session": {
            "tags": ["a"],
            "user_metadata": {"k": "v"},
            "sdk_version": "0.36.0",
            "project_id": "p",
            "display_name": "d",
        },
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "toy",
            "user_metadata": {"k": "v"},
            "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
            "optimizer_config": {"type": "adamw"},
        },
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 0,
            "base_model": "toy",
            "model_path": "tinker://a:train:0/weights/b",
        },
        "join_sampling_session": {"sampling_session_id": f"{session}:sample:0"},
        "create_custom_loss": {
            "session_id": session,
            "custom_loss_seq_id": 0,
            "name": "f",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": [node]},
        },
        "get_info": {"model_id": model},
        "retrieve_futures": {
            "target": {
                "type": "sampling_session",
                "sampling_session_id": f"{session}:sample:0",
                "cloned_sampler_id": 0,
            },
            "prev_cursor": 0,
            "retrieved_request_ids": ["x"],
            "timeout": 0.01,
        },
        "cancel_future": {"request_id": "x"},
        "retrieve_future": {"request_id": f"{model}:0", "allow_metadata_only": True},
        "telemetry": {
            "events": [{"event": "GENERIC_EVENT", "event_name": "x", "event_data": {}}],
            "platform": "Linux",
            "sdk_version": "0.36.0",
            "session_id": session,
        },
        "load_weights": {
            "session_id": session,
            "model_seq_id": 99,
            "path": "tinker://a:train:0/weights/b",
            "optimizer": False,
        },
    }
    for route, valid in bodies.items():
        for what, body in wrong_versions(valid, thorough):
            if route == "create_model" and isinstance(body.get("model_seq_id"), int):
                body["model_seq_id"] += 1000
            check(await app_world.post(route, body), f"{route} {what}")
    assert (await app_world.post("session_heartbeat", {"session_id": session})).status_code == 200


async def test_a_body_that_is_no_json_object_is_refused(app_world: AppWorld) -> None:
    headers = {"content-type": "application/json"}
    for raw in (b"{", b"[]", b"null", b'"x"', b'{"a": NaN}', b"\xff\xfe", b'{"a":' * 2000):
        for route in [*NUMBERED, "asample", "create_model", "create_session", "retrieve_future"]:
            answer = await app_world.post(route, raw, headers=headers)
            check(answer, f"{route} {raw[:10]!r}")
            assert answer.status_code == 400, f"{route} {raw[:10]!r}: {answer.text}"
