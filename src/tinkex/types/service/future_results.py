"""What the answer to a poll can be: all that a promise may become, and two ways not to be done."""

from __future__ import annotations

from typing import TypeAlias

from tinkex.types.service.futures import RequestFailedResponse, TryAgainResponse
from tinkex.types.training.forward_backward import ForwardBackwardOutput
from tinkex.types.training.models import CreateModelResponse, UnloadModelResponse
from tinkex.types.training.optimizer import OptimStepResponse
from tinkex.types.training.weights import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)
