"""Every public type is made into a plain dict, and back."""

from __future__ import annotations

import json
import types as pytypes
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import pytest
from pydantic import AwareDatetime, BaseModel

import tinkex
from tinkex import types
from tinkex.errors import InvalidInputError

TENSOR = types.TensorData([1.0, 2.5], "float32", [2])
SPARSE = types.TensorData([1, 2], "int64", [2, 3], [0, 1, 2], [0, 2])
INPUT = types.ModelInput(
    [types.EncodedTextChunk([1, 2]), types.ImageChunk(b"\x00\x01", "png", expected_tokens=3)]
)
DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"weights": TENSOR, "own": SPARSE})
SPANS = [types.PromptProvenanceSpan(sequence_id="a", length=1)]
SPANS += [types.SampledProvenanceSpan(sequence_id="a", offset=1, length=1)]
PASS = types.ForwardBackwardInput([DATUM], "ppo", {"clip": 0.2})
SEQUENCE = types.SampledSequence(
    "stop", "id", [1, 2], [-1.0, -2.5], topk_logprobs=[[(5, -1.0)]] * 2
)
EXAMPLES: dict[str, Any] = {
    "TensorData": SPARSE,
    "EncodedTextChunk": types.EncodedTextChunk([1, 2]),
    "ImageChunk": types.ImageChunk(b"\x00\x01", "png", expected_tokens=3),
    "ImageAssetPointerChunk": types.ImageAssetPointerChunk(
        format="png", location="s3://a", expected_tokens=3
    ),
    "DmelChunk": types.DmelChunk(b"abc"),
    "ModelInput": INPUT,
    "Datum": DATUM.with_provenance(SPANS, SPANS),
    "PromptProvenanceSpan": SPANS[0],
    "SampledProvenanceSpan": SPANS[1],
    "TopkLogprobs": types.TopkLogprobs.from_list([[(5, -1.0), (6, -2.0)]]),
    "ForwardBackwardInput": PASS,
    "ForwardBackwardRequest": types.ForwardBackwardRequest(PASS, "m", 3),
    "ForwardRequest": types.ForwardRequest(PASS, "m"),
    "ForwardBackwardOutput": types.ForwardBackwardOutput("x", [{"logprobs": TENSOR}], {"a:sum": 1}),
    "SampledSequence": SEQUENCE,
    "SampleResponse": types.SampleResponse(
        [SEQUENCE],
        [np.nan, -1.0],
        target_prompt_logprobs=TENSOR,
        prompt_alt_tokens=types.PromptAltTokens(SPARSE, TENSOR),
        prompt_cache_hit_tokens=3,
        topk_prompt_logprobs=[None, [(5, -1.0)]],
        prompt_routed_experts=TENSOR,
    ),
    "PromptAltTokens": types.PromptAltTokens(SPARSE, TENSOR),
    "LoraConfig": types.LoraConfig(rank=8),
    "ExternalWeightsUploadStartResult": types.ExternalWeightsUploadStartResult(
        "u", {"a": "http://b"}, datetime(2026, 1, 2, tzinfo=UTC)
    ),
    "ExternalWeightsUploadFinishResult": types.ExternalWeightsUploadFinishResult("tinker://a/b/c"),
    "InterpolateCheckpointsRequest": types.InterpolateCheckpointsRequest(
        source_paths=["tinker://a/b/c", "tinker://a/b/d"], coefficients=[0.9, 0.1]
    ),
    "WeightsSnapshot": types.WeightsSnapshot("s", step=3),
    "TrajectorySequence": types.TrajectorySequence(
        tokens=(1,), mask=(1,), logprobs=(-1.0,), snapshots=("",), stop_reason="stop"
    ),
    "SampleRequest": types.SampleRequest(
        prompt=INPUT, sampling_params=types.SamplingParams(max_tokens=3, stop=["a"]), num_samples=2
    ),
}
NAMES = sorted(
    name
    for name in types.__all__
    if isinstance(kind := getattr(types, name), type) and not issubclass(kind, Enum | str)
)


def example(kind: Any) -> Any:
    """A value of an annotation; of a message one with every field that must be given."""
    if kind is Any:
        return "a"
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, TypeVar):
        return "a"
    if origin is Annotated:
        return example(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin in (Union, pytypes.UnionType):
        return example(next(one for one in arguments if one is not type(None)))
    if origin is list:
        return [example(arguments[0])]
    if origin in (dict, pytypes.MappingProxyType):
        return {example(arguments[0]): example(arguments[1])}
    if origin is tuple:
        return tuple(example(one) for one in arguments if one is not ...)
    plain = {str: "a", int: 4000, float: 0.5, bool: True, dict: {}, list: [], bytes: b"a"}
    if kind in plain:
        return plain[kind]
    if kind in (datetime, AwareDatetime):
        return datetime(2026, 1, 2, tzinfo=UTC)
    if issubclass(kind, Enum):
        return next(iter(kind))
    if kind.__name__ in EXAMPLES:
        return EXAMPLES[kind.__name__]
    given = {n: f for n, f in kind.model_fields.items() if f.is_required()}
    return kind.model_validate({name: example(field.annotation) for name, field in given.items()})


@pytest.mark.parametrize("name", NAMES)
def test_every_public_type_goes_to_a_dict_and_back(name: str) -> None:
    kind = getattr(types, name)
    value = EXAMPLES[name] if name in EXAMPLES else example(kind)
    plain = value.to_dict()
    assert kind.from_dict(json.loads(json.dumps(plain))) == value
    assert isinstance(plain, dict)
    for wrong in (5, None, [plain]):
        with pytest.raises(InvalidInputError):
            kind.from_dict(wrong)


def test_a_field_of_a_newer_server_is_left_out_of_a_result() -> None:
    for name in NAMES:
        value = EXAMPLES[name] if name in EXAMPLES else example(getattr(types, name))
        if getattr(type(value), "model_config", {}).get("extra") not in ("forbid", "allow"):
            assert type(value).from_dict({**value.to_dict(), "of_a_newer_server": 1}) == value


def test_a_step_goes_to_a_dict_and_back() -> None:
    passed, stepped = EXAMPLES["ForwardBackwardOutput"], types.OptimStepResponse(metrics={"a": 1.0})
    step = tinkex.TrainStepResult(passed, stepped, {"age": 2.0})
    again = tinkex.TrainStepResult.from_dict(json.loads(json.dumps(step.to_dict())))
    assert again == step
    for wrong in (5, None, {}, {**step.to_dict(), "ages": 3}):
        with pytest.raises(InvalidInputError):
            tinkex.TrainStepResult.from_dict(wrong)


def test_the_walk_sees_the_types() -> None:
    assert len(NAMES) > 120
    assert set(EXAMPLES) <= set(NAMES)
    others = {getattr(types, name) for name in set(NAMES) - set(EXAMPLES)}
    assert all(issubclass(kind, BaseModel) for kind in others)


def test_a_dict_serves_where_a_sequence_belongs() -> None:
    response = EXAMPLES["SampleResponse"]
    again = types.SampleResponse([SEQUENCE.to_dict()])
    assert again.sequences == response.sequences


@pytest.mark.parametrize(
    ("name", "field", "wrong", "text"),
    [
        ("Datum", "model_input_spans", 5, "^model_input_spans: expected a list, got 5"),
        ("Datum", "model_input_spans", [{}], r"^model_input_spans\[0\]: expected an object with"),
        ("Datum", "loss_fn_input_spans", ["a"], r"^loss_fn_input_spans\[0\]: expected an object"),
        (
            "Datum",
            "model_input_spans",
            [{"prompt_tokens": {"sequence_id": "", "length": 1}}],
            r"^model_input_spans\[0\].prompt_tokens.sequence_id: expected a non-empty id, got ''",
        ),
        ("TopkLogprobs", "token_ids", "x", "^token_ids: expected rows of numbers"),
        ("TopkLogprobs", "token_ids", [[1], [2, 3]], "^token_ids: expected rows of numbers"),
        ("TopkLogprobs", "logprobs", [["x"]], "^logprobs: expected rows of numbers"),
    ],
)
def test_what_is_wrong_deep_in_a_dict_is_named_with_its_path(
    name: str, field: str, wrong: object, text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        getattr(types, name).from_dict({**EXAMPLES[name].to_dict(), field: wrong})


def test_positions_without_any_likely_token_are_still_counted() -> None:
    """Of a prompt of one token, whose first has none."""
    response = types.SampleResponse([], topk_prompt_logprobs=[None, None])
    assert response.topk_prompt_logprobs == [None, None]
    assert types.SampleResponse.from_dict(response.to_dict()) == response


def test_what_is_wrong_in_a_dict_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"^data\[0\].model_input"):
        types.ForwardBackwardInput.from_dict({"data": [{"loss_fn_inputs": {}}], "loss_fn": "ppo"})
    with pytest.raises(InvalidInputError, match="^max_tokens: must be"):
        types.SamplingParams.from_dict({"max_tokens": "many"})
