"""Answers to a poll, read as the class they belong to."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tinkex import types

ANSWERS: TypeAdapter[Any] = TypeAdapter(types.FutureRetrieveResponse)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"type": "try_again", "request_id": "r"}, types.TryAgainResponse),
        ({"status": "pending"}, types.FuturePendingResponse),
        ({"status": "completed", "result": {"metrics": {}}}, types.FutureCompletedResponse),
        ({"status": "failed", "error": {"message": "no"}}, types.FutureFailedResponse),
        (
            {"status": "complete_metadata", "response_payload_size": 3},
            types.CompleteMetadataResponse,
        ),
        ({"error": "no", "category": "user"}, types.RequestFailedResponse),
        ({"loss_fn_outputs": [], "metrics": {"a:sum": 1.0}}, types.ForwardBackwardOutput),
        (
            {"sequences": [{"stop_reason": "stop", "tokens": [1], "logprobs": [-0.5]}]},
            types.SampleResponse,
        ),
        ({"metrics": {"a:sum": 1.0}}, types.OptimStepResponse),
        ({}, types.OptimStepResponse),
        ({"path": "tinker://m/weights/a"}, types.SaveWeightsResponse),
        ({"type": "load_weights", "path": "tinker://m/weights/a"}, types.LoadWeightsResponse),
        ({"type": "create_model", "model_id": "m"}, types.CreateModelResponse),
        ({"type": "unload_model", "model_id": "m"}, types.UnloadModelResponse),
    ],
)
def test_an_answer_is_read_as_its_class(answer: dict[str, Any], kind: type) -> None:
    read = ANSWERS.validate_python(answer)
    assert type(read) is kind
    assert ANSWERS.validate_python(ANSWERS.dump_python(read, mode="json")) == read


@pytest.mark.parametrize("answer", [{"status": "archived"}, {"type": "odd"}, {"status": 3}, 5])
def test_an_answer_of_no_known_kind_is_refused(answer: object) -> None:
    with pytest.raises(ValidationError):
        ANSWERS.validate_python(answer)


def test_a_failure_is_read_from_both_its_forms() -> None:
    nested = types.FutureFailedResponse.model_validate(
        {"status": "failed", "error": {"message": "bad", "category": "USER"}}
    )
    flat = types.RequestFailedResponse.model_validate({"error": "bad", "category": "user"})
    assert (nested.error, nested.category) == (flat.error, flat.category) == ("bad", "user")
