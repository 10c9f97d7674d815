"""The vocabulary of the API: every request, result and value, one module per noun.

Names load when first touched: `from tinkex.types import Datum` brings in numpy but not pydantic.
Nothing here knows how a value travels; that is `tinkex.wire`.
"""

# ruff: noqa: F403
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinkex.contract.optimizers import OPTIMIZERS

if TYPE_CHECKING:  # every module of `_MODULES`; a test compares them
    from tinkex.types.account.audit import *
    from tinkex.types.account.billing import *
    from tinkex.types.account.checkpoints import *
    from tinkex.types.data.chunks import *
    from tinkex.types.data.datum import *
    from tinkex.types.data.loss import *
    from tinkex.types.data.model_input import *
    from tinkex.types.data.provenance import *
    from tinkex.types.data.tensor_data import *
    from tinkex.types.data.topk_logprobs import *
    from tinkex.types.fields.identifiers import *
    from tinkex.types.sampling.request import *
    from tinkex.types.sampling.response import *
    from tinkex.types.sampling.samplers import *
    from tinkex.types.sampling.snapshot import *
    from tinkex.types.sampling.stop_reason import *
    from tinkex.types.sampling.trajectory import *
    from tinkex.types.service.checkpoint_search import *
    from tinkex.types.service.future_results import *
    from tinkex.types.service.futures import *
    from tinkex.types.service.request_error import *
    from tinkex.types.service.search_owner import *
    from tinkex.types.service.server import *
    from tinkex.types.service.session_search import *
    from tinkex.types.service.session_status import *
    from tinkex.types.service.sessions import *
    from tinkex.types.service.telemetry import *
    from tinkex.types.training.custom_loss import *
    from tinkex.types.training.forward_backward import *
    from tinkex.types.training.models import *
    from tinkex.types.training.optimizer import *
    from tinkex.types.training.weights import *
    from tinkex.types.training.weights_upload import *

# Adam, Dimuon of the hosted service, and whatever else is declared.
_OPTIMIZERS = ("Dimuon", *(each.__name__.removesuffix("Params") for each in OPTIMIZERS.values()))
_NAMES = {
    "account.audit": "AuditLogEntry AuditLogResponse",
    "account.billing": (
        "BillingEventInfo BillingUsageEvent BillingUsageResponse BillingUsageSession "
        "CheckpointBillingEvent CurrentCheckpointStorageUsageItem "
        "CurrentCheckpointStorageUsageResponse GetBillingUsageRequest "
        "GetCurrentCheckpointStorageUsageRequest SamplingPrefillBillingEvent "
        "SamplingSampleBillingEvent StorageBillingEvent TrainingBillingEvent"
    ),
    "account.checkpoints": (
        "CheckpointName CheckpointNamesResponse Checkpoint CheckpointArchiveUrlResponse "
        "CheckpointType CheckpointsListResponse Cursor ParsedCheckpointTinkerPath "
        "SetCheckpointTtlRequest RunReference RunSegment RunWorker TrainingRun TrainingRunsResponse"
    ),
    "data.chunks": "DmelChunk EncodedTextChunk ImageAssetPointerChunk ImageChunk ModelInputChunk",
    "data.datum": "Datum",
    "data.loss": "LossFnInputs LossFnOutput LossFnType",
    "data.model_input": "ModelInput",
    "data.provenance": "PromptProvenanceSpan ProvenanceSpan ProvenanceSpans SampledProvenanceSpan",
    "data.tensor_data": "TensorData TensorDtype",
    "data.topk_logprobs": "TopkLogprobs",
    "fields.identifiers": "ModelID RequestID",
    "sampling.request": (
        "CreateSamplingSessionRequest JoinSamplingSessionRequest SampleRequest SamplingParams"
    ),
    "sampling.response": "PromptAltTokens SampleResponse SampledSequence",
    "sampling.samplers": (
        "CreateSamplingSessionResponse GetSamplerResponse JoinSamplingSessionResponse"
    ),
    "sampling.snapshot": "WeightsSnapshot",
    "sampling.stop_reason": "StopReason",
    "sampling.trajectory": "Trajectory TrajectoryAnswer TrajectorySequence",
    "service.checkpoint_search": (
        "CheckpointSearchCursor CheckpointSearchRequest CheckpointSearchResponse"
    ),
    "service.future_results": "FutureRetrieveResponse",
    "service.futures": (
        "CancelFutureRequest CompleteMetadataResponse FutureCompletedResponse FutureCompletion "
        "FutureFailed FutureFailedResponse FutureFinished FuturePendingResponse "
        "FutureRetrieveRequest FuturesRetrieveRequest "
        "FuturesRetrieveResponse QueueState RequestFailedResponse SamplingSessionFuturesTarget "
        "TryAgainResponse UntypedAPIFuture"
    ),
    "service.request_error": "RequestErrorCategory is_retryable",
    "service.search_owner": ("AccessibleSearchOwner OwnSearchOwner SearchOwner UserSearchOwner"),
    "service.server": (
        "ApiKeyDetails ApiKeyResponse AuthTokenResponse ClientConfigRequest ClientConfigResponse "
        "ClientDynamicConfigResponse GetServerCapabilitiesResponse HealthResponse OrgDetails "
        "SupportedModel UserDetails WhoamiResponse"
    ),
    "service.session_search": (
        "ActiveSessionStatusQuery CancelledSessionStatusQuery "
        "ClientFinishedSessionStatusQuery FailedSessionStatusQuery "
        "SessionSearchCursor SessionSearchRequest SessionSearchResponse SessionStatusQuery "
        "SessionSummary"
    ),
    "service.session_status": (
        "ClientSessionFinishErrored ClientSessionFinishInterrupted ClientSessionFinishReason "
        "ClientSessionFinishReasonType ClientSessionFinishSuccess ClientSessionFinished "
        "SessionActive SessionCancelled SessionFailed SessionFailedReason "
        "SessionFailedRequestReason SessionFailedSamplingSessionReason "
        "SessionFailedTrainingRunReason SessionStatus"
    ),
    "service.sessions": (
        "AssignSessionProjectRequest CreateSessionRequest CreateSessionResponse "
        "FinishSessionRequest GetSessionResponse ListSessionsResponse SessionHeartbeatRequest "
        "SessionHeartbeatResponse TraceExportResponse"
    ),
    "service.telemetry": (
        "EventType GenericEvent SessionEndEvent SessionStartEvent Severity TelemetryBatch "
        "TelemetryEvent TelemetryResponse TelemetrySendRequest UnhandledExceptionEvent"
    ),
    "training.custom_loss": (
        "CreateCustomLossRequest CreateCustomLossResponse CustomLossGraph CustomLossInput "
        "CustomLossInputRank CustomLossNode"
    ),
    "training.forward_backward": (
        "ForwardBackwardInput ForwardBackwardOutput ForwardBackwardRequest ForwardRequest"
    ),
    "training.models": (
        "CreateModelRequest CreateModelResponse GetInfoRequest GetInfoResponse LoraConfig "
        "ModelData UnloadModelRequest UnloadModelResponse"
    ),
    "training.optimizer": (
        "OptimParams OptimParamsBase OptimStepRequest OptimStepResponse OptimizerConfig "
        "OptimizerConfigBase"
    ),
    "training.weights": (
        "CopyWeightsRequest CopyWeightsResponse ExternalWeightsUrlsResponse "
        "InterpolateCheckpointsRequest InterpolateCheckpointsResponse LoadWeightsRequest "
        "LoadWeightsResponse SaveWeightsExternalRequest SaveWeightsExternalResponse "
        "SaveWeightsExternalResponseInternal SaveWeightsForSamplerRequest "
        "SaveWeightsForSamplerResponse SaveWeightsForSamplerResponseInternal SaveWeightsRequest "
        "SamplingClientKind SaveWeightsResponse WeightsInfoRequest WeightsInfoResponse"
    ),
    "training.weights_upload": (
        "ExternalWeightsUploadFinishRequest ExternalWeightsUploadFinishResponse "
        "ExternalWeightsUploadFinishResult ExternalWeightsUploadStartRequest "
        "ExternalWeightsUploadStartResponse ExternalWeightsUploadStartResult"
    ),
}
"""The public names of each module."""
_MODULES = {module: names.split() for module, names in _NAMES.items()}
_MODULES["training.optimizer"] += [f"{name}Params" for name in _OPTIMIZERS]
_MODULES["training.optimizer"] += [f"{name}OptimizerConfig" for name in _OPTIMIZERS]
_OWNER = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_OWNER)


def __getattr__(name: str) -> Any:
    if (module := _OWNER.get(name)) is None:
        raise AttributeError(f"module 'tinkex.types' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"tinkex.types.{module}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
