"""The fast writer of requests spells as Python's own encoder does, which the official SDKs use."""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

import numpy as np
import pytest

from tinkex import types
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.types.service.extensions import SampleBatchRequest
from tinkex.wire import Generation, requests
from tinkex.wire.json_codec import dumps, dumps_slowly

PROMPT = types.ModelInput.from_ints([3, 1, 2])


def test_floats_of_all_sizes_are_spelt_alike() -> None:
    chance = random.Random(0)
    for number in range(20_000):
        bits = struct.unpack("d", chance.randbytes(8))[0]
        value = bits if number % 2 else chance.random() * 10 ** chance.randint(-8, 20)
        for held in ({"a": value}, [value], [1, -value]):
            assert not math.isfinite(value) or dumps(held) == dumps_slowly(held), value


def test_texts_are_spelt_alike() -> None:
    chance = random.Random(1)
    for _ in range(5_000):
        points = (chance.choice([chance.randrange(128), chance.randrange(0xD800)]), 0x1F600)
        text = "".join(map(chr, points)) + "3e5,1e5 0.00001"
        assert dumps({text: text}) == dumps_slowly({text: text}), text


def _obvious(request: types.SampleRequest) -> bytes:
    """A sample as pydantic and Python write it."""
    fields = request.model_dump(mode="json", exclude_none=True)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 5, "seed": 7, "stop": "x", "temperature": 0.0, "top_k": 3, "top_p": 0.9},
        {"stop": [], "temperature": 1e-5},
        {"stop": ["a", 2], "min_p": 1e-7, "logit_bias": {7: -100, 3: 1e-5}},
    ],
)
def test_a_sample_is_written_as_the_obvious_way_writes_it(params: dict[str, Any]) -> None:
    request = types.SampleRequest(
        prompt=PROMPT,
        sampling_params=types.SamplingParams(**params),
        sampling_session_id="3e5\u00e9",
        seq_id=2**40,
        prompt_logprobs=True,
        target_prompt_logprobs=types.TensorData([[1, -1], [2, 3]], "int64"),
        prompt_logprobs_last_n=1,
        routed_experts=True,
    )
    for _ in range(2):  # the second time, settings are remembered
        assert requests.encode("asample", request).content == _obvious(request)


def test_equal_settings_of_other_types_are_not_mixed_up() -> None:
    for temperature in (1, 1.0):
        params = types.SamplingParams.model_construct(temperature=temperature)
        request = types.SampleRequest(prompt=PROMPT, sampling_params=params)
        assert (
            f'"temperature":{temperature}'.encode() in requests.encode("asample", request).content
        )


def test_a_number_that_json_cannot_write_is_refused() -> None:
    targets = types.TensorData.from_numpy(np.array([np.nan], np.float32))
    request = types.SampleRequest(
        prompt=PROMPT, sampling_params=types.SamplingParams(), target_prompt_logprobs=targets
    )
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        requests.encode("asample", request)


def test_a_batch_is_its_samples_joined() -> None:
    samples = [
        types.SampleRequest(prompt=PROMPT, sampling_params=types.SamplingParams(), seq_id=n)
        for n in range(3)
    ]
    bodies = [requests.encode("asample", sample) for sample in samples]
    batch = requests.encode("asample_batch", SampleBatchRequest(requests=samples))
    assert batch == requests.join_samples(bodies)
    assert json.loads(batch.content)["requests"] == [json.loads(body.content) for body in bodies]


def test_an_old_server_gets_a_sample_in_its_own_dialect() -> None:
    """Fields it does not know are left out where they change nothing, and refused elsewhere."""
    asked = {"prompt": PROMPT, "sampling_params": types.SamplingParams(max_tokens=1), "seq_id": 0}
    request = types.SampleRequest(**asked, record_stability_info=False, topk_sample_logprobs=0)
    assert json.loads(requests.encode("asample", request, Generation.V0_4).content) == {
        "prompt": {"chunks": [{"tokens": [3, 1, 2]}]},
        "sampling_params": {"max_tokens": 1},
        "seq_id": 0,
    }
    with pytest.raises(NotSupportedError, match="topk_sample_logprobs"):
        requests.encode(
            "asample", types.SampleRequest(**asked, topk_sample_logprobs=2), Generation.V0_4
        )


def test_whole_numbers_of_any_length_are_written() -> None:
    """orjson ends at 64 bits; metadata of a session may hold longer ones."""
    value = {"a": [2**64 - 1, 2**64, -(2**63) - 1, 1e-05]}
    assert dumps(value) == dumps_slowly(value)
    with pytest.raises(TypeError):
        dumps({"a": object()})
