"""Tinkex: the Tinker training API on your laptop, your GPUs, a cluster or the hosted service.

Names load when first touched, so `import tinkex` costs milliseconds and pulls in neither torch nor
a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__title__ = "tinkex"

# Public name -> module that owns it.
_EXPORTS: dict[str, str] = {
    "APIConnectionError": "tinkex.errors",
    "APIError": "tinkex.errors",
    "APIFuture": "tinkex.client.futures",
    "APIResponseValidationError": "tinkex.errors",
    "APIStatusError": "tinkex.errors",
    "APITimeoutError": "tinkex.errors",
    "AdminClient": "tinkex.client.admin_client",
    "AuthenticationError": "tinkex.errors",
    "BadRequestError": "tinkex.errors",
    "BillingError": "tinkex.errors",
    "CircuitOpenError": "tinkex.errors",
    "ClientClosedError": "tinkex.errors",
    "ClientConfig": "tinkex.client.config",
    "ConfigError": "tinkex.errors",
    "ConflictError": "tinkex.errors",
    "ExperimentalWarning": "tinkex.errors",
    "FutureStatus": "tinkex.client.futures",
    "InternalServerError": "tinkex.errors",
    "LocalServerError": "tinkex.errors",
    "LossHandle": "tinkex.client.loss_tracing",
    "NotFoundError": "tinkex.errors",
    "PerDatumLossFn": "tinkex.client.loss_tracing",
    "PermissionDeniedError": "tinkex.errors",
    "PromiseLostError": "tinkex.errors",
    "RateLimitError": "tinkex.errors",
    "RecoveryFailedError": "tinkex.errors",
    "RecoveryPolicy": "tinkex.client.recovery",
    "RegularizerError": "tinkex.errors",
    "RegularizerTimeoutError": "tinkex.errors",
    "RunMonitor": "tinkex.client.run_monitor",
    "RequestFailedError": "tinkex.errors",
    "RequestOptions": "tinkex.client.transport",
    "RestClient": "tinkex.client.rest_client",
    "ResultTimeoutError": "tinkex.errors",
    "RetrieveError": "tinkex.errors",
    "RetryConfig": "tinkex.client.retry",
    "RetryableException": "tinkex.errors",
    "SamplingClient": "tinkex.client.sampling_client",
    "ServiceClient": "tinkex.client.service_client",
    "Timeout": "httpx",
    "TrainStepResult": "tinkex.client.train_step",
    "TrainingClient": "tinkex.client.training_client",
    "UnprocessableEntityError": "tinkex.errors",
    "InvalidInputError": "tinkex.errors",
    "TinkerError": "tinkex.errors",
    "AdamOptimizerConfig": "tinkex.types",
    "AdamParams": "tinkex.types",
    "Checkpoint": "tinkex.types",
    "CheckpointType": "tinkex.types",
    "Datum": "tinkex.types",
    "DimuonOptimizerConfig": "tinkex.types",
    "DimuonParams": "tinkex.types",
    "DmelChunk": "tinkex.types",
    "EncodedTextChunk": "tinkex.types",
    "ForwardBackwardOutput": "tinkex.types",
    "LoraConfig": "tinkex.types",
    "ModelID": "tinkex.types",
    "ModelInput": "tinkex.types",
    "ModelInputChunk": "tinkex.types",
    "OptimParams": "tinkex.types",
    "OptimStepRequest": "tinkex.types",
    "OptimStepResponse": "tinkex.types",
    "ParsedCheckpointTinkerPath": "tinkex.types",
    "PromptProvenanceSpan": "tinkex.types",
    "SampleRequest": "tinkex.types",
    "SampleResponse": "tinkex.types",
    "SampledProvenanceSpan": "tinkex.types",
    "SampledSequence": "tinkex.types",
    "SamplingParams": "tinkex.types",
    "StopReason": "tinkex.types",
    "TensorData": "tinkex.types",
    "TensorDtype": "tinkex.types",
    "TrainingRun": "tinkex.types",
}
# Public submodule -> where it lives.
_SUBMODULES: dict[str, str] = {
    "auth": "tinkex.auth",
    "errors": "tinkex.errors",
    "events": "tinkex.client.events",
    "metrics": "tinkex.client.metrics",
    "regularizers": "tinkex.regularizers",
    "types": "tinkex.types",
}

__all__ = sorted([*_EXPORTS, *_SUBMODULES, "__title__", "__version__"])


def __getattr__(name: str) -> Any:
    if (module := _SUBMODULES.get(name)) is not None:
        return import_module(module)
    if (module := _EXPORTS.get(name)) is not None:
        value = globals()[name] = getattr(import_module(module), name)
        return value
    raise AttributeError(f"module 'tinkex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
