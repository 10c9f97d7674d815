"""What a client wrote is what an engine gets, in both generations of the wire."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tinkex.engine.jobs import CsrArray
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.jobs import decode
from tinkex.types import Datum, EncodedTextChunk, ForwardBackwardInput, ModelInput, TensorData
from tinkex.types.training.forward_backward import ForwardBackwardRequest, ForwardRequest
from tinkex.wire import Body, Generation, requests
from tinkex.wire import tinker_public_pb2 as pb
from tinkex.wire.generation import JSON, PROTOBUF


def random_pass(chance: random.Random) -> ForwardBackwardRequest | ForwardRequest:
    kind = chance.choice([ForwardBackwardRequest, ForwardRequest])
    config: dict[str, float | str] | None = chance.choice(
        [None, {"clip_low": 0.8}, {"b": 2.5, "a": 1.0}]
    )
    loss_fn = chance.choice(["cross_entropy", "ppo", "importance_sampling"])
    data = [random_datum(chance) for _ in range(chance.randint(1, 4))]
    given = ForwardBackwardInput(data, loss_fn, config)
    return kind(given, f"model-{chance.randint(0, 9)}", chance.randint(1, 2**31 - 1))


def random_datum(chance: random.Random) -> Datum:
    chunks = []
    for _ in range(chance.randint(1, 3)):
        tokens = [chance.randrange(2**17) for _ in range(chance.randint(1, 6))]
        chunks.append(EncodedTextChunk(tokens=tokens))
    length = sum(len(chunk.tokens) for chunk in chunks)
    names = chance.sample(["target_tokens", "weights", "logprobs", "advantages"], 2)
    return Datum(ModelInput(chunks=chunks), {name: random_tensor(chance, length) for name in names})


def random_tensor(chance: random.Random, length: int) -> TensorData:
    rng = np.random.default_rng(chance.randrange(2**31))
    width = chance.randint(2, 4)
    shape = chance.choice([(length,), (length, width)])
    if chance.random() < 0.3:
        dense = rng.normal(size=(length, width)).astype(np.float32)
        dense[rng.random(dense.shape) < 0.6] = 0
        rows, columns = np.nonzero(dense)
        crow = np.searchsorted(rows, np.arange(length + 1))
        return TensorData(
            dense[rows, columns], "float32", [length, width], crow.tolist(), columns.tolist()
        )
    if chance.random() < 0.5:
        return TensorData.from_numpy(rng.integers(-(2**40), 2**40, shape))
    return TensorData.from_numpy(rng.normal(size=shape).astype(np.float32))


def read_by_server(body: Any, name: str) -> decode.TrainRequest:
    return decode.train_request(requests.open_body(name, body.content, body.content_type).read())


def work_of(message: Any) -> decode.TrainRequest:
    body = Body(message.SerializeToString(), PROTOBUF)
    return read_by_server(body, "forward_backward")


@pytest.mark.parametrize("generation", [Generation.V0_36, Generation.V0_4])
@pytest.mark.parametrize("seed", range(60))
def test_an_engine_gets_what_was_sent(seed: int, generation: Generation) -> None:
    request = random_pass(random.Random(seed))
    is_old_forward = isinstance(request, ForwardRequest) and generation is Generation.V0_4
    name = "forward" if is_old_forward else "forward_backward"
    logprobs = [datum.loss_fn_inputs.get("logprobs") for datum in request.input.data]
    if generation is Generation.V0_4 and any(x is not None and x.is_sparse for x in logprobs):
        with pytest.raises(NotSupportedError, match="no sparse form"):
            requests.encode(name, request, generation)
        return
    work = read_by_server(requests.encode(name, request, generation), name)
    assert work.loss_fn == request.input.loss_fn
    assert dict(work.loss_fn_config) == dict(request.input.loss_fn_config or {})
    assert len(work.data) == len(request.input.data)
    for mine, sent in zip(work.data, request.input.data, strict=True):
        assert mine.tokens.dtype == np.int64
        assert mine.tokens.tolist() == sent.model_input.to_ints()
        assert list(mine.inputs) == sorted(sent.loss_fn_inputs)
        for key, tensor in sent.loss_fn_inputs.items():
            if tensor.is_sparse and generation is Generation.V0_4:  # which sends cells, all of them
                tensor = TensorData.from_numpy(tensor.to_numpy())
            same_tensor(mine.inputs[key], tensor)


def same_tensor(mine: Any, other: TensorData) -> None:
    if isinstance(mine, CsrArray):
        assert other.crow_array is not None
        assert other.col_array is not None
        assert list(mine.shape) == list(other.shape or ())
        np.testing.assert_array_equal(mine.crow_indices, other.crow_array)
        np.testing.assert_array_equal(mine.col_indices, other.col_array)
        mine = mine.values
    else:
        assert other.crow_array is None
        assert mine.shape == tuple(other.shape or other.array.shape)
    assert mine.dtype == other.array.dtype
    np.testing.assert_array_equal(np.ravel(mine), np.ravel(other.array))


def test_sparse_rows_in_json_stay_sparse() -> None:
    sent = TensorData([5, 6], "int64", [3, 4], [0, 1, 1, 2], [3, 0])
    got = decode.array_of(TensorData._validate_object(sent.to_dict()))
    assert isinstance(got, CsrArray)
    same_tensor(got, sent)


def test_numbers_of_a_protobuf_pass_are_not_copied() -> None:
    """A large batch is held once, in the message it came in."""
    weights = np.arange(1000, dtype=np.float32)
    datum = Datum(ModelInput.from_ints(range(1000)), {"weights": weights})
    given = ForwardBackwardInput([datum], "cross_entropy")
    body = requests.encode("forward_backward", ForwardBackwardRequest(given, "m", 1))
    work = read_by_server(body, "forward_backward")
    assert not work.data[0].inputs["weights"].flags.owndata
    np.testing.assert_array_equal(work.data[0].inputs["weights"], weights)


def test_narrow_numbers_are_widened_exactly() -> None:
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    inputs = message.data.add().loss_fn_inputs
    inputs["target_tokens"].dense = np.array([-1, 2**31 - 1], "<i4").tobytes()
    inputs["target_tokens"].dtype = pb.DTYPE_INT32
    halves = np.array([1.5, -3e38], "<f4")
    inputs["weights"].dense = (halves.view("<u4") >> 16).astype("<u2").tobytes()
    inputs["weights"].dtype = pb.DTYPE_BFLOAT16
    got = work_of(message).data[0].inputs
    assert got["target_tokens"].tolist() == [-1, 2**31 - 1]
    assert got["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(got["weights"], (halves.view("<u4") >> 16 << 16).view("<f4"))


def test_where_tokens_came_from_never_stops_a_pass() -> None:
    """Provenance means nothing to an engine, so a newer SDK may say it in newer ways."""
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    message.data.add().model_input_spans.add()
    assert len(work_of(message).data) == 1


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        ({"type": "image", "data": "eA==", "format": "png"}, "images are not supported"),
        ({"type": "image_asset_pointer", "location": "x", "format": "png"}, "images are not"),
        ({"type": "dmel", "dmel": "AA=="}, "dmel audio is not supported"),
    ],
)
def test_what_a_text_model_cannot_take_is_refused_by_name(chunk: Any, says: str) -> None:
    text = {"type": "encoded_text", "tokens": [1]}
    with pytest.raises(NotSupportedError, match=says) as caught:
        decode.tokens_of(ModelInput([text, chunk]), "prompt")
    assert caught.value.path == "prompt.chunks[1]"


def test_a_wrong_field_is_invalid_input_and_a_broken_body_is_not() -> None:
    """Programs tell the two apart by `code`."""
    wrong = b'{"prompt": {"chunks": [{"tokens": [1, "a"]}]}, "sampling_params": {}}'
    with pytest.raises(InvalidInputError) as field:
        requests.open_body("asample", wrong).read()
    assert (field.value.code, field.value.path) == ("invalid_input", "prompt.chunks[0].tokens[1]")
    message = pb.ForwardBackwardRequest(model_id="m")
    message.data.add().loss_fn_inputs["weights"].dense = b"abc"
    with pytest.raises(InvalidInputError) as field:
        work_of(message)
    assert field.value.code == "invalid_input"
    assert field.value.path == "data[0].loss_fn_inputs.weights.dtype"
    for content, kind in ((b"\xff", PROTOBUF), (b"{", JSON)):
        with pytest.raises(InvalidInputError) as body:
            requests.open_body("forward_backward", content, kind)
        assert body.value.code == "invalid_wire"
