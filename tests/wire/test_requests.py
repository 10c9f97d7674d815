"""What decoding forgives and what it refuses, and where it says so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bodies import decode

from tinkex import types
from tinkex.errors import InvalidInputError, NotSupportedError, WireError
from tinkex.wire import Body, Generation, requests, results
from tinkex.wire import tinker_public_pb2 as pb
from tinkex.wire.body import unpack
from tinkex.wire.generation import JSON, PROTOBUF, names_protobuf

DATUM = {
    "model_input": {"chunks": [{"tokens": [1, 2]}]},
    "loss_fn_inputs": {"weights": {"data": [1.0, 2.0], "dtype": "float32", "shape": [2]}},
}

SPARSE = {"data": [1.0], "sparse_crow_indices": [0, 1], "sparse_col_indices": [7]}


def old_pass(**changes: object) -> bytes:
    inner = {"data": [DATUM, DATUM | changes], "loss_fn": "cross_entropy"}
    return json.dumps({"forward_backward_input": inner, "model_id": "m", "seq_id": 1}).encode()


def weights(**changes: object) -> dict:
    tensor = DATUM["loss_fn_inputs"]["weights"] | changes
    return {"loss_fn_inputs": {"weights": tensor}}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        (weights(shape=[128]), "data[1].loss_fn_inputs.weights",
         "expected 128 values for shape [128], got 2"),
        (weights(dtype="int32"), "data[1].loss_fn_inputs.weights.dtype", "int32"),
        (weights(dtype=None), "data[1].loss_fn_inputs.weights.dtype", "got None"),
        (weights(data=[1, "a"]), "data[1].loss_fn_inputs.weights.data[1]", "'a'"),
        (weights(data=[[1], [2, 3]]), "data[1].loss_fn_inputs.weights.data", "rectangular"),
        (weights(data=[[1], [2]]), "data[1].loss_fn_inputs.weights.data[0]", "a number"),
        (weights(data=[1, True]), "data[1].loss_fn_inputs.weights.data[1]", "got True"),
        (weights(data=7), "data[1].loss_fn_inputs.weights.data", "list"),
        (weights(**SPARSE, shape=[1, 2**40]), "data[1].loss_fn_inputs.weights.shape", "cells"),
        ({"loss_fn_inputs": {"weights": [1.0, 2.0]}}, "data[1].loss_fn_inputs.weights", "object"),
        (weights(data=[1, float("nan")]), "data[1].loss_fn_inputs.weights[1]", "finite"),
        (weights(data=[float("inf"), 1]), "data[1].loss_fn_inputs.weights[0]", "finite"),
        (weights(shape=[-1, -2]), "data[1].loss_fn_inputs.weights.shape", "0 or more"),
        ({"model_input": None}, "data[1].model_input", "object"),
        ({"model_input": {"chunks": [{"tokens": ["a"]}]}},
         "data[1].model_input.chunks[0].tokens[0]", "'a'"),
        ({"model_input": {"chunks": [{"tokens": [2, False]}]}},
         "data[1].model_input.chunks[0].tokens[1]", "got False"),
        ({"model_input": {"chunks": [{"tokens": {}}]}},
         "data[1].model_input.chunks[0].tokens", "list"),
        ({"model_input": {"chunks": [{}]}}, "data[1].model_input.chunks[0].type", "unknown"),
        ({"loss_fn_inputs": []}, "data[1].loss_fn_inputs", "object"),
    ],
)  # fmt: skip
def test_a_wrong_datum_is_named_by_its_path(changes, path, words):
    with pytest.raises(InvalidInputError) as caught:
        decode("forward_backward", old_pass(**changes))
    assert caught.value.path == path
    assert words in str(caught.value)


@pytest.mark.parametrize("length", [3, 257, 5000])
def test_truth_is_no_number_however_long_the_list(length):
    """Of a long list the types are looked at only where a value is 0 or 1."""
    for value, start in ((True, 2.0), (False, 2.0), (True, 0.0)):
        data = [start] * (length - 1) + [value]
        with pytest.raises(
            InvalidInputError, match=f"data.{length - 1}.: expected a number, got {value}"
        ):
            decode("forward_backward", old_pass(**weights(data=data, shape=None)))
    numbers = [0, 1, 0.0] + [1.0] * (length - 3)
    body = old_pass(**weights(data=numbers, shape=None))
    assert decode("forward_backward", body).input.data[1].loss_fn_inputs["weights"]


def test_a_long_nested_list_is_refused():
    with pytest.raises(InvalidInputError, match="expected a number"):
        decode("forward_backward", old_pass(**weights(data=[[2.0]] * 300, shape=None)))


def test_missing_loss_inputs_are_none_at_all():
    """SDK 0.4.1 leaves out what was not set."""
    request = decode("forward_backward", old_pass(loss_fn_inputs=None))
    assert request.input.data[1].loss_fn_inputs == {}


def pass_with(name, values, shape):
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="kl_divergence")
    tensor = message.data.add().loss_fn_inputs[name]
    tensor.dense, tensor.dtype = np.array(values, "<f4").tobytes(), pb.DTYPE_FLOAT32
    tensor.shape.extend(shape)
    return message.SerializeToString()


def test_only_logprobs_of_candidates_may_be_minus_infinity():
    """A candidate of probability zero; anything else that is not finite is a mistake."""
    values = [-1.0, -np.inf]
    request = decode("forward_backward", pass_with("logprobs", values, [1, 2]), PROTOBUF)
    assert request.input.data[0].loss_fn_inputs["logprobs"].data == values
    for name, wrong, shape in (
        ("logprobs", values, [2]),
        ("weights", values, [1, 2]),
        ("logprobs", [-np.inf, np.nan], [1, 2]),
        ("logprobs", [-np.inf, np.inf], [1, 2]),
    ):
        with pytest.raises(InvalidInputError, match=rf"{name}.1.: must be finite"):
            decode("forward_backward", pass_with(name, wrong, shape), PROTOBUF)


def test_settings_of_both_maps_count_and_the_newer_one_wins():
    """Nothing that was sent is dropped."""
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    message.loss_fn_config.update({"a": 1.0, "b": 2.0})
    message.loss_fn_config_v2["b"].number = 3.0
    message.loss_fn_config_v2["c"].text = "x"
    request = decode("forward_backward", message.SerializeToString(), PROTOBUF)
    assert request.input.loss_fn_config == {"a": 1.0, "b": 3.0, "c": "x"}


def test_a_setting_of_a_thousand_digits_is_refused():
    """It becomes a Python integer only where a NaN forces the slower parser."""
    inner = b'{"data":[],"loss_fn":"ppo","loss_fn_config":{"a":' + b"9" * 1000 + b',"b":NaN}}'
    body = b'{"model_id":"m","forward_backward_input":' + inner + b"}"
    with pytest.raises(InvalidInputError, match="loss_fn_config.a: must be finite"):
        decode("forward_backward", body)


def test_a_wrong_tensor_in_protobuf_is_named_by_its_path():
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    message.data.add()
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.dense, tensor.dtype = np.zeros(127, np.float32).tobytes(), pb.DTYPE_FLOAT32
    tensor.shape.append(128)
    with pytest.raises(
        InvalidInputError, match="^data.1..loss_fn_inputs.weights: expected 128 values"
    ):
        decode("forward_backward", message.SerializeToString(), PROTOBUF)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda m: m.data[0].model_input.add(), "data[0].model_input.chunks[0]"),
        (lambda m: m.loss_fn_config_v2["x"], "loss_fn_config.x"),
        (lambda m: m.loss_fn_config.update({"x": float("nan")}), "loss_fn_config.x"),
        (lambda m: setattr(m.data[0].loss_fn_inputs["w"], "dense", b"abc"),
         "data[0].loss_fn_inputs.w.dtype"),
    ],
)  # fmt: skip
def test_a_hollow_protobuf_message_is_refused(change, path):
    message = pb.ForwardBackwardRequest(model_id="m")
    message.data.add()
    change(message)
    with pytest.raises(InvalidInputError) as caught:
        decode("forward_backward", message.SerializeToString(), PROTOBUF)
    assert caught.value.path == path


def test_unknown_fields_are_ignored_at_every_depth():
    """A newer SDK must not break an older server."""
    body = {"model_id": "m", "new": 1, "adam_params": {"learning_rate": 1}}
    request = decode("optim_step", json.dumps(body).encode())
    assert request.adam_params == types.AdamParams(learning_rate=1.0)
    request = decode("forward_backward", old_pass(new={"deep": [1]}))
    assert len(request.input.data) == 2


@pytest.mark.parametrize(
    "step",
    [
        {"adam_params": {"nesterov": True}},
        {"optimizer_params": {"type": "muon", "learning_rate": 1, "x": 1}},
    ],
)
def test_an_unknown_number_of_a_step_is_refused(step):
    """Leaving it out would train another model."""
    with pytest.raises(InvalidInputError, match="no such field"):
        decode("optim_step", json.dumps({"model_id": "m", **step}).encode())


@pytest.mark.parametrize(
    ("name", "body", "path"),
    [
        ("create_model", {"session_id": "s", "model_seq_id": "0", "base_model": "m"},
         "model_seq_id"),
        ("create_model", {"session_id": "s", "model_seq_id": 0}, "base_model"),
        ("optim_step", {"model_id": "m", "adam_params": {"beta1": "x"}}, "adam_params.beta1"),
        ("optim_step", {"model_id": "m"}, ""),
        ("asample", {"prompt": {"chunks": []}, "sampling_params": {"top_k": 1.5}},
         "sampling_params.top_k"),
        ("asample", {"prompt": {"chunks": [5]}, "sampling_params": {}}, "prompt.chunks[0]"),
        ("retrieve_future", {"request_id": 5}, "request_id"),
        ("search_sessions", {"limit": 1000}, "limit"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_by_its_path(name, body, path):
    with pytest.raises(InvalidInputError) as caught:
        decode(name, json.dumps(body).encode())
    assert caught.value.path == path


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":1}x'])
@pytest.mark.parametrize("name", ["optim_step", "asample", "forward_backward"])
def test_what_is_not_an_object_is_refused(name, raw):
    with pytest.raises(InvalidInputError):
        decode(name, raw)


def test_a_field_the_older_server_does_not_know_is_refused_not_dropped():
    """Dropping `weight_decay` silently would train another model."""
    adam = types.AdamParams(weight_decay=0.1)
    step = types.OptimStepRequest(adam_params=adam, model_id="m")
    with pytest.raises(NotSupportedError, match="weight_decay"):
        requests.encode("optim_step", step, Generation.V0_4)
    harmless = types.OptimStepRequest(adam_params=types.AdamParams(weight_decay=0.0), model_id="m")
    assert b"weight_decay" not in requests.encode("optim_step", harmless, Generation.V0_4).content
    load = types.LoadWeightsRequest(model_id="m", path="p", optimizer=True)
    with pytest.raises(NotSupportedError, match="optimizer"):
        requests.encode("load_weights", load, Generation.V0_4)


def test_sparse_logprobs_are_refused_where_zeros_would_stand_for_what_is_left_out():
    """A candidate that is left out has probability 0; a 0 among logprobs has probability 1."""
    sparse = {"sparse_crow_indices": [0, 1], "sparse_col_indices": [1]}
    inputs = {
        "target_tokens": types.TensorData([1, 2], "int64", [1, 2]),
        "logprobs": types.TensorData([-0.5], "float32", [1, 2], **sparse),
    }
    datum = types.Datum(types.ModelInput.from_ints([1]), inputs)
    asked = types.ForwardBackwardRequest(
        types.ForwardBackwardInput([datum], "kl_divergence"), "m", 1
    )
    with pytest.raises(NotSupportedError, match=r"loss_fn_inputs\.logprobs"):
        requests.encode("forward_backward", asked, Generation.V0_4)


def test_the_two_explicit_nulls_are_sent():
    ttl = types.SetCheckpointTtlRequest(ttl_seconds=None)
    assert requests.encode("set_checkpoint_ttl", ttl).content == b'{"ttl_seconds":null}'
    end = types.FinishSessionRequest(reason=types.ClientSessionFinishSuccess())
    assert requests.encode("finish_session", end).content.endswith(b'"detail":null}')


def test_cancelling_sends_the_request_id_alone():
    body = requests.encode("cancel_future", types.CancelFutureRequest(request_id="r"))
    assert body.content == b'{"request_id":"r"}'


@pytest.mark.parametrize("generation", Generation)
@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("create_session",
         types.CreateSessionRequest(tags=[], sdk_version="1", user_metadata={"a": object()})),
        ("asample", types.SampleRequest(
            prompt=types.ModelInput([types.ImageAssetPointerChunk("png", "\ud800", 1)]),
            sampling_params=types.SamplingParams())),
    ],
)  # fmt: skip
def test_what_json_cannot_hold_is_refused(name, request_, generation):
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        requests.encode(name, request_, generation)


def test_an_older_image_is_sent_in_the_newer_form():
    """Settled: image fields follow the server's generation."""
    chunk = types.ImageChunk(b"x", "png", height=10, width=20, tokens=5)
    request = types.SampleRequest(
        prompt=types.ModelInput([chunk]), sampling_params=types.SamplingParams()
    )
    body = json.loads(requests.encode("asample", request).content)
    sent = {"data": "eA==", "format": "png", "expected_tokens": 5, "type": "image"}
    assert body["prompt"]["chunks"] == [sent]
    old = json.loads(requests.encode("asample", request, Generation.V0_4).content)
    assert old["prompt"]["chunks"][0]["width"] == 20


def test_an_image_pointer_cannot_be_trained_on():
    chunk = types.ImageAssetPointerChunk("png", "s3://x", 5)
    datum = types.Datum(types.ModelInput([chunk]))
    request = types.ForwardBackwardRequest(types.ForwardBackwardInput([datum], "ppo"), "m", 1)
    with pytest.raises(InvalidInputError, match="ImageAssetPointerChunk") as caught:
        requests.encode("forward_backward", request)
    assert caught.value.path == "data[0].model_input.chunks[0]"


def test_an_unknown_endpoint_and_a_wrong_type_are_refused():
    with pytest.raises(InvalidInputError, match="known: "):
        decode("teleport", b"{}")
    with pytest.raises(InvalidInputError, match="OptimStepRequest"):
        requests.encode("optim_step", types.GetInfoRequest(model_id="m"))
    with pytest.raises(WireError, match="sent as JSON"):
        decode("optim_step", b"", PROTOBUF)


# ------------------------------------------------------------------------------------ bodies


def test_zstd_is_undone_up_to_the_limit():
    body = Body(b"x" * 1000, JSON).compressed()
    assert body.headers == {"Content-Type": JSON, "Content-Encoding": "zstd"}
    assert unpack(body.content, "zstd", max_bytes=1000) == b"x" * 1000
    with pytest.raises(WireError, match="limit is 999"):
        unpack(body.content, "zstd", max_bytes=999)
    with pytest.raises(WireError, match="limit is 5"):
        unpack(b"123456", None, max_bytes=5)
    with pytest.raises(WireError, match="gzip"):
        unpack(b"", "gzip")
    with pytest.raises(WireError, match="zstd"):
        unpack(body.content[:-3], "zstd")


def test_either_header_says_whether_protobuf_is_spoken():
    assert names_protobuf("application/x-protobuf; charset=x")
    assert not names_protobuf(None)
    assert names_protobuf("application/x-protobuf, application/json")
    assert not names_protobuf("application/json")


# ------------------------------------------------------------------------------------ results


def test_a_loss_output_type_that_is_left_out_reads_as_empty():
    """The settled contradiction: the field exists, and may be missing."""
    output = results.decode(types.ForwardBackwardOutput, b'{"loss_fn_outputs":[],"metrics":{}}')
    assert output.loss_fn_output_type == ""


def test_the_number_of_sequences_must_match_the_promise():
    response = types.SampleResponse([types.SampledSequence("stop", "", [1])])
    for accept in (None, PROTOBUF):
        body = results.encode(response, accept)
        with pytest.raises(WireError, match="expected 2 sequences, got 1"):
            results.decode(
                types.SampleResponse, body.content, body.content_type, sequence_ids=["a", "b"]
            )


def test_older_clients_see_two_stop_reasons_only():
    response = types.SampleResponse([types.SampledSequence("max_tokens", "", [1])])
    assert json.loads(results.encode(response).content)["sequences"][0]["stop_reason"] == "length"
    arrived = results.decode(
        types.SampleResponse, b'{"sequences":[{"stop_reason":"eos","tokens":[1]}]}'
    )
    assert arrived.sequences[0].stop_reason is types.StopReason.EOS
