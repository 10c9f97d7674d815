"""The server reads bodies straight into what an engine takes, `wire.requests` into types.

Two readers, because a request must be numbered even when the rest of it is refused, and because the
types would only be taken apart again. This holds the fast one against the other.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tinkex.engine.jobs import CsrArray
from tinkex.server import decode
from tinkex.types import Datum, EncodedTextChunk, ForwardBackwardInput, ModelInput, TensorData
from tinkex.types.forward_backward import ForwardBackwardRequest, ForwardRequest
from tinkex.wire import Generation, requests


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
    if "protobuf" in body.content_type:
        return decode.train_from_proto(decode.parse_train_proto(body.content))
    parsed = decode.load_json(body.content)
    return decode.train_from_json(parsed, forward_only=name == "forward")


@pytest.mark.parametrize("generation", [Generation.V0_36, Generation.V0_4])
@pytest.mark.parametrize("seed", range(60))
def test_both_readers_of_a_pass_agree(seed: int, generation: Generation) -> None:
    request = random_pass(random.Random(seed))
    is_forward = isinstance(request, ForwardRequest)
    name = "forward" if is_forward and generation is Generation.V0_4 else "forward_backward"
    body = requests.encode(name, request, generation)
    ours = read_by_server(body, name)
    theirs = requests.decode(name, body.content, body.content_type)
    assert ours.forward_only == isinstance(theirs, ForwardRequest) == is_forward
    assert (ours.model_id, ours.seq_id) == (theirs.model_id, theirs.seq_id)
    assert ours.loss_fn == theirs.input.loss_fn
    assert dict(ours.loss_fn_config) == dict(theirs.input.loss_fn_config or {})
    assert len(ours.data) == len(theirs.input.data)
    for mine, other in zip(ours.data, theirs.input.data, strict=True):
        assert mine.tokens.tolist() == other.model_input.to_ints()
        assert set(mine.inputs) == set(other.loss_fn_inputs)
        for key, tensor in other.loss_fn_inputs.items():
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
