"""What the answer to a poll can be: all that a promise may become, and the ways not to be done."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Discriminator, Tag

from tinkex.types.sampling.response import SampleResponse
from tinkex.types.service.futures import (
    CompleteMetadataResponse,
    FutureCompletedResponse,
    FutureFailedResponse,
    FuturePendingResponse,
    RequestFailedResponse,
    TryAgainResponse,
)
from tinkex.types.training.forward_backward import ForwardBackwardOutput
from tinkex.types.training.models import CreateModelResponse, UnloadModelResponse
from tinkex.types.training.optimizer import OptimStepResponse
from tinkex.types.training.weights import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

_BY_STATUS = {
    "pending": "FuturePendingResponse",
    "completed": "FutureCompletedResponse",
    "failed": "FutureFailedResponse",
    "complete_metadata": "CompleteMetadataResponse",
}
_BY_TYPE = {
    "try_again": "TryAgainResponse",
    "sample": "SampleResponse",
    "create_model": "CreateModelResponse",
    "unload_model": "UnloadModelResponse",
    "save_weights": "SaveWeightsResponse",
    "load_weights": "LoadWeightsResponse",
    "save_weights_for_sampler": "SaveWeightsForSamplerResponse",
    "save_weights_external": "SaveWeightsExternalResponse",
}
# Answers without a type, by a field that no other has; a step may have none at all.
_BY_FIELD = {
    "error": "RequestFailedResponse",
    "loss_fn_outputs": "ForwardBackwardOutput",
    "sequences": "SampleResponse",
    "path": "SaveWeightsResponse",
    "model_id": "CreateModelResponse",
}


def _kind(answer: Any) -> str | None:
    """The name of the class that an answer belongs to. None: it is none of these."""
    if not isinstance(answer, dict):
        return type(answer).__name__
    if (status := answer.get("status")) is not None:
        return _BY_STATUS.get(status) if isinstance(status, str) else None
    if (kind := answer.get("type")) is not None:
        return _BY_TYPE.get(kind) if isinstance(kind, str) else None
    named = (name for field, name in _BY_FIELD.items() if field in answer)
    return next(named, "OptimStepResponse")


FutureRetrieveResponse: TypeAlias = Annotated[
    Annotated[TryAgainResponse, Tag("TryAgainResponse")]
    | Annotated[FuturePendingResponse, Tag("FuturePendingResponse")]
    | Annotated[FutureCompletedResponse, Tag("FutureCompletedResponse")]
    | Annotated[FutureFailedResponse, Tag("FutureFailedResponse")]
    | Annotated[CompleteMetadataResponse, Tag("CompleteMetadataResponse")]
    | Annotated[ForwardBackwardOutput, Tag("ForwardBackwardOutput")]
    | Annotated[SampleResponse, Tag("SampleResponse")]
    | Annotated[OptimStepResponse, Tag("OptimStepResponse")]
    | Annotated[SaveWeightsResponse, Tag("SaveWeightsResponse")]
    | Annotated[LoadWeightsResponse, Tag("LoadWeightsResponse")]
    | Annotated[SaveWeightsForSamplerResponse, Tag("SaveWeightsForSamplerResponse")]
    | Annotated[SaveWeightsExternalResponse, Tag("SaveWeightsExternalResponse")]
    | Annotated[CreateModelResponse, Tag("CreateModelResponse")]
    | Annotated[UnloadModelResponse, Tag("UnloadModelResponse")]
    | Annotated[RequestFailedResponse, Tag("RequestFailedResponse")],
    Discriminator(_kind),
]
"""For pydantic's `TypeAdapter`: it reads an answer as the class that it belongs to."""
