"""Tinkex: the Tinker training API on your laptop, your GPUs or the hosted service.

Names load when first touched, so `import tinkex` costs milliseconds and pulls in neither torch nor
a server.
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time names load when touched
    from httpx import Timeout as Timeout

    from tinkex import auth as auth
    from tinkex import errors as errors
    from tinkex import events as events
    from tinkex import regularizers as regularizers
    from tinkex import types as types
    from tinkex.client import metrics as metrics
    from tinkex.client.config import ClientConfig as ClientConfig
    from tinkex.client.futures import APIFuture as APIFuture
    from tinkex.client.futures import FutureStatus as FutureStatus
    from tinkex.client.http.options import RequestOptions as RequestOptions
    from tinkex.client.recovery.policy import RecoveryEvent as RecoveryEvent
    from tinkex.client.recovery.policy import RecoveryPolicy as RecoveryPolicy
    from tinkex.client.recovery.run_monitor import RunMonitor as RunMonitor
    from tinkex.client.rest.admin_client import AdminClient as AdminClient
    from tinkex.client.rest.rest_client import RestClient as RestClient
    from tinkex.client.sampling.sample_retry import RetryConfig as RetryConfig
    from tinkex.client.sampling.sampling_client import SamplingClient as SamplingClient
    from tinkex.client.service.service_client import ServiceClient as ServiceClient
    from tinkex.client.session.polling import QueueStateObserver as QueueStateObserver
    from tinkex.client.training.loss_tracing import LossHandle as LossHandle
    from tinkex.client.training.loss_tracing import PerDatumLossFn as PerDatumLossFn
    from tinkex.client.training.recovering_client import (
        RecoveringTrainingClient as RecoveringTrainingClient,
    )
    from tinkex.client.training.train_step import TrainStepResult as TrainStepResult
    from tinkex.client.training.training_client import TrainingClient as TrainingClient
    from tinkex.errors import APIConnectionError as APIConnectionError
    from tinkex.errors import APIError as APIError
    from tinkex.errors import APIResponseValidationError as APIResponseValidationError
    from tinkex.errors import APIStatusError as APIStatusError
    from tinkex.errors import APITimeoutError as APITimeoutError
    from tinkex.errors import AuthenticationError as AuthenticationError
    from tinkex.errors import BadRequestError as BadRequestError
    from tinkex.errors import BillingError as BillingError
    from tinkex.errors import CircuitOpenError as CircuitOpenError
    from tinkex.errors import ClientClosedError as ClientClosedError
    from tinkex.errors import ConfigError as ConfigError
    from tinkex.errors import ConflictError as ConflictError
    from tinkex.errors import ExperimentalWarning as ExperimentalWarning
    from tinkex.errors import InternalServerError as InternalServerError
    from tinkex.errors import InvalidInputError as InvalidInputError
    from tinkex.errors import LocalServerError as LocalServerError
    from tinkex.errors import NotFoundError as NotFoundError
    from tinkex.errors import PermissionDeniedError as PermissionDeniedError
    from tinkex.errors import PromiseLostError as PromiseLostError
    from tinkex.errors import RateLimitError as RateLimitError
    from tinkex.errors import RecoveryFailedError as RecoveryFailedError
    from tinkex.errors import RegularizerError as RegularizerError
    from tinkex.errors import RegularizerTimeoutError as RegularizerTimeoutError
    from tinkex.errors import RequestFailedError as RequestFailedError
    from tinkex.errors import ResultTimeoutError as ResultTimeoutError
    from tinkex.errors import RetrieveError as RetrieveError
    from tinkex.errors import RetryableException as RetryableException
    from tinkex.errors import TinkerError as TinkerError
    from tinkex.errors import UnprocessableEntityError as UnprocessableEntityError
    from tinkex.types import AdamOptimizerConfig as AdamOptimizerConfig
    from tinkex.types import AdamParams as AdamParams
    from tinkex.types import Checkpoint as Checkpoint
    from tinkex.types import CheckpointType as CheckpointType
    from tinkex.types import Datum as Datum
    from tinkex.types import DimuonOptimizerConfig as DimuonOptimizerConfig
    from tinkex.types import DimuonParams as DimuonParams
    from tinkex.types import DmelChunk as DmelChunk
    from tinkex.types import EncodedTextChunk as EncodedTextChunk
    from tinkex.types import ForwardBackwardOutput as ForwardBackwardOutput
    from tinkex.types import LoraConfig as LoraConfig
    from tinkex.types import ModelID as ModelID
    from tinkex.types import ModelInput as ModelInput
    from tinkex.types import ModelInputChunk as ModelInputChunk
    from tinkex.types import OptimParams as OptimParams
    from tinkex.types import OptimStepRequest as OptimStepRequest
    from tinkex.types import OptimStepResponse as OptimStepResponse
    from tinkex.types import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
    from tinkex.types import PromptProvenanceSpan as PromptProvenanceSpan
    from tinkex.types import SampledProvenanceSpan as SampledProvenanceSpan
    from tinkex.types import SampledSequence as SampledSequence
    from tinkex.types import SampleRequest as SampleRequest
    from tinkex.types import SampleResponse as SampleResponse
    from tinkex.types import SamplingParams as SamplingParams
    from tinkex.types import StopReason as StopReason
    from tinkex.types import TensorData as TensorData
    from tinkex.types import TensorDtype as TensorDtype
    from tinkex.types import TrainingRun as TrainingRun

    __version__: str

__title__ = "tinkex"

# Module -> the public names it owns.
_NAMES = {
    "httpx": "Timeout",
    "tinkex.client.config": "ClientConfig",
    "tinkex.client.futures": "APIFuture FutureStatus",
    "tinkex.client.sampling.sample_retry": "RetryConfig",
    "tinkex.client.http.options": "RequestOptions",
    "tinkex.client.session.polling": "QueueStateObserver",
    "tinkex.client.recovery.policy": "RecoveryEvent RecoveryPolicy",
    "tinkex.client.training.recovering_client": "RecoveringTrainingClient",
    "tinkex.client.recovery.run_monitor": "RunMonitor",
    "tinkex.client.rest.admin_client": "AdminClient",
    "tinkex.client.rest.rest_client": "RestClient",
    "tinkex.client.sampling.sampling_client": "SamplingClient",
    "tinkex.client.service.service_client": "ServiceClient",
    "tinkex.client.training.loss_tracing": "LossHandle PerDatumLossFn",
    "tinkex.client.training.train_step": "TrainStepResult",
    "tinkex.client.training.training_client": "TrainingClient",
    "tinkex.errors": (
        "APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError "
        "AuthenticationError BadRequestError BillingError CircuitOpenError ClientClosedError "
        "ConfigError ConflictError ExperimentalWarning InternalServerError InvalidInputError "
        "LocalServerError NotFoundError PermissionDeniedError PromiseLostError RateLimitError "
        "RecoveryFailedError RegularizerError RegularizerTimeoutError RequestFailedError "
        "ResultTimeoutError RetrieveError RetryableException TinkerError UnprocessableEntityError"
    ),
    "tinkex.types": (
        "AdamOptimizerConfig AdamParams Checkpoint CheckpointType Datum DimuonOptimizerConfig "
        "DimuonParams DmelChunk EncodedTextChunk ForwardBackwardOutput LoraConfig ModelID "
        "ModelInput ModelInputChunk OptimParams OptimStepRequest OptimStepResponse "
        "ParsedCheckpointTinkerPath PromptProvenanceSpan SampleRequest SampleResponse "
        "SampledProvenanceSpan SampledSequence SamplingParams StopReason TensorData TensorDtype "
        "TrainingRun"
    ),
}
_EXPORTS = {name: module for module, names in _NAMES.items() for name in names.split()}
# Public submodule -> where it lives.
_SUBMODULES: dict[str, str] = {
    "auth": "tinkex.auth",
    "errors": "tinkex.errors",
    "events": "tinkex.events",
    "metrics": "tinkex.client.metrics",
    "regularizers": "tinkex.regularizers",
    "types": "tinkex.types",
}

__all__ = sorted([*_EXPORTS, *_SUBMODULES, "__title__", "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = globals()[name] = _version()
        return value
    if (module := _SUBMODULES.get(name)) is not None:
        return import_module(module)
    if (module := _EXPORTS.get(name)) is not None:
        value = globals()[name] = getattr(import_module(module), name)
        return value
    raise AttributeError(f"module 'tinkex' has no attribute {name!r}")


def _version() -> str:
    """The installed version. It comes from the git tag, when the package is built or installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tinkex")
    except PackageNotFoundError:  # run from a source folder that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__


@atexit.register
def _end_clients() -> None:
    """Registered on import: exit handlers of those who import us come first and can still send."""
    if (loop := sys.modules.get("tinkex.client.background_loop")) is not None:
        loop.end_background()
