"""Any value of any type survives encode and decode in each generation it exists in."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from bodies import decode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tinkex import types
from tinkex.types.fields.message import Response
from tinkex.wire import Generation, proto_requests, requests, results
from tinkex.wire import tinker_public_pb2 as pb
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.generation import PROTOBUF
from tinkex.wire.sdk_0_4 import FIELDS

spec = importlib.util.spec_from_file_location(
    "wire_strategies", Path(__file__).with_name("strategies.py")
)
assert spec is not None
assert spec.loader is not None
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

few = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
many = settings(few, max_examples=150)

MODELS = {
    row.name: row.request
    for row in ENDPOINTS.values()
    if isinstance(row.request, type) and issubclass(row.request, BaseModel)
    if row.name != "asample_batch"  # its parts are read one by one
}
# What SDK 0.4.1 could send.
OLD = [
    "asample", "create_model", "create_sampling_session", "create_session", "get_info",
    "load_weights", "optim_step", "retrieve_future", "save_weights", "save_weights_for_sampler",
    "session_heartbeat", "telemetry", "unload_model",
]  # fmt: skip
RESULTS = [
    value
    for name in types.__all__
    if isinstance(value := getattr(types, name), type)
    and issubclass(value, Response)
    and name.endswith(("Response", "Internal", "UntypedAPIFuture", "Checkpoint", "TrainingRun"))
]


@pytest.mark.parametrize("name", MODELS)
@few
@given(data=st.data())
def test_a_request_survives_the_newer_dialect(name: str, data: Any) -> None:
    request = data.draw(make.models(MODELS[name]))
    body = requests.encode(name, request)
    assert decode(name, body.content, body.content_type) == request


@pytest.mark.parametrize("name", OLD)
@few
@given(data=st.data())
def test_a_request_survives_the_older_dialect(name: str, data: Any) -> None:
    kind = MODELS[name]
    known = FIELDS.get(kind.__name__) or tuple(kind.model_fields)
    if kind is types.OptimStepRequest:
        adam = data.draw(make.models(types.AdamParams, FIELDS["AdamParams"]))
        request = types.OptimStepRequest(adam_params=adam, model_id="m")
    else:
        request = data.draw(make.models(kind, known))
    body = requests.encode(name, request, Generation.V0_4)
    assert decode(name, body.content, body.content_type) == request


@many
@given(request=make.passes("0.36"))
def test_a_pass_survives_protobuf(request: Any) -> None:
    body = requests.encode("forward_backward", request)
    assert decode("forward_backward", body.content, body.content_type) == request
    packed = requests.encode("forward_backward", request, compress=True)
    again = decode("forward_backward", packed.content, packed.content_type, packed.content_encoding)
    assert again == request


@many
@given(request=make.passes("0.36"))
def test_the_fast_writer_builds_the_message_of_the_slow_one(request: Any) -> None:
    fast, slow = proto_requests.encode(request), proto_requests.encode_slowly(request)
    read = pb.ForwardBackwardRequest.FromString
    assert len(fast) == len(slow)
    assert read(fast).SerializeToString(deterministic=True) == slow


@many
@given(request=make.passes("0.4.1"))
def test_a_pass_survives_json(request: Any) -> None:
    name = "forward" if isinstance(request, types.ForwardRequest) else "forward_backward"
    body = requests.encode(name, request, Generation.V0_4)
    again = decode(name, body.content, body.content_type)
    assert again == request
    assert requests.encode(name, again, Generation.V0_4).content == body.content


@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
@few
@given(data=st.data())
def test_a_result_survives(kind: type[BaseModel], data: Any) -> None:
    value = data.draw(make.models(kind))
    body = results.encode(value)
    assert results.decode(kind, body.content, body.content_type) == value


@many
@given(response=make.sample_responses(proto=True))
def test_a_sample_survives_protobuf(response: Any) -> None:
    body = results.encode(response, PROTOBUF)
    names = [item.sequence_id for item in response.sequences]
    kind = types.SampleResponse
    assert results.decode(kind, body.content, PROTOBUF, sequence_ids=names) == response


@many
@given(response=make.sample_responses(proto=False))
def test_a_sample_survives_json(response: Any) -> None:
    again = results.decode(types.SampleResponse, results.encode(response).content)
    assert results.encode(again).content == results.encode(response).content
    assert again.sequences == response.sequences


@many
@given(output=make.pass_outputs(proto=True))
def test_a_pass_result_survives_protobuf(output: Any) -> None:
    body = results.encode(output, PROTOBUF)
    assert results.decode(types.ForwardBackwardOutput, body.content, PROTOBUF) == output


@many
@given(output=make.pass_outputs(proto=False))
def test_a_pass_result_survives_json(output: Any) -> None:
    body = results.encode(output)
    assert results.decode(types.ForwardBackwardOutput, body.content) == output
