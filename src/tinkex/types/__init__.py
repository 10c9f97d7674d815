"""The vocabulary of the API: every request, result and value, one module per noun.

Names load when first touched: `from tinkex.types import Datum` brings in numpy but not pydantic.
Nothing here knows how a value travels; that is `tinkex.wire`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.types.audit import AuditLogEntry as AuditLogEntry
    from tinkex.types.audit import AuditLogResponse as AuditLogResponse
    from tinkex.types.billing import BillingEventInfo as BillingEventInfo
    from tinkex.types.billing import BillingUsageEvent as BillingUsageEvent
    from tinkex.types.billing import BillingUsageResponse as BillingUsageResponse
    from tinkex.types.billing import BillingUsageSession as BillingUsageSession
    from tinkex.types.billing import CheckpointBillingEvent as CheckpointBillingEvent
    from tinkex.types.billing import (
        CurrentCheckpointStorageUsageItem as CurrentCheckpointStorageUsageItem,
    )
    from tinkex.types.billing import (
        CurrentCheckpointStorageUsageResponse as CurrentCheckpointStorageUsageResponse,
    )
    from tinkex.types.billing import GetBillingUsageRequest as GetBillingUsageRequest
    from tinkex.types.billing import (
        GetCurrentCheckpointStorageUsageRequest as GetCurrentCheckpointStorageUsageRequest,
    )
    from tinkex.types.billing import SamplingPrefillBillingEvent as SamplingPrefillBillingEvent
    from tinkex.types.billing import SamplingSampleBillingEvent as SamplingSampleBillingEvent
    from tinkex.types.billing import StorageBillingEvent as StorageBillingEvent
    from tinkex.types.billing import TrainingBillingEvent as TrainingBillingEvent
    from tinkex.types.checkpoints import Checkpoint as Checkpoint
    from tinkex.types.checkpoints import (
        CheckpointArchiveUrlResponse as CheckpointArchiveUrlResponse,
    )
    from tinkex.types.checkpoints import CheckpointsListResponse as CheckpointsListResponse
    from tinkex.types.checkpoints import CheckpointType as CheckpointType
    from tinkex.types.checkpoints import Cursor as Cursor
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
    from tinkex.types.checkpoints import SetCheckpointTtlRequest as SetCheckpointTtlRequest
    from tinkex.types.checkpoints import TrainingRun as TrainingRun
    from tinkex.types.checkpoints import TrainingRunsResponse as TrainingRunsResponse
    from tinkex.types.chunks import DmelChunk as DmelChunk
    from tinkex.types.chunks import EncodedTextChunk as EncodedTextChunk
    from tinkex.types.chunks import ImageAssetPointerChunk as ImageAssetPointerChunk
    from tinkex.types.chunks import ImageChunk as ImageChunk
    from tinkex.types.chunks import ModelInputChunk as ModelInputChunk
    from tinkex.types.custom_loss import CreateCustomLossRequest as CreateCustomLossRequest
    from tinkex.types.custom_loss import CreateCustomLossResponse as CreateCustomLossResponse
    from tinkex.types.custom_loss import CustomLossGraph as CustomLossGraph
    from tinkex.types.custom_loss import CustomLossInput as CustomLossInput
    from tinkex.types.custom_loss import CustomLossInputRank as CustomLossInputRank
    from tinkex.types.custom_loss import CustomLossNode as CustomLossNode
    from tinkex.types.datum import Datum as Datum
    from tinkex.types.forward_backward import ForwardBackwardInput as ForwardBackwardInput
    from tinkex.types.forward_backward import ForwardBackwardOutput as ForwardBackwardOutput
    from tinkex.types.forward_backward import ForwardBackwardRequest as ForwardBackwardRequest
    from tinkex.types.forward_backward import ForwardRequest as ForwardRequest
    from tinkex.types.futures import CancelFutureRequest as CancelFutureRequest
    from tinkex.types.futures import CompleteMetadataResponse as CompleteMetadataResponse
    from tinkex.types.futures import FutureCompletion as FutureCompletion
    from tinkex.types.futures import FutureFailed as FutureFailed
    from tinkex.types.futures import FutureFinished as FutureFinished
    from tinkex.types.futures import FutureRetrieveRequest as FutureRetrieveRequest
    from tinkex.types.futures import FutureRetrieveResponse as FutureRetrieveResponse
    from tinkex.types.futures import FuturesRetrieveRequest as FuturesRetrieveRequest
    from tinkex.types.futures import FuturesRetrieveResponse as FuturesRetrieveResponse
    from tinkex.types.futures import QueueState as QueueState
    from tinkex.types.futures import RequestFailedResponse as RequestFailedResponse
    from tinkex.types.futures import SamplingSessionFuturesTarget as SamplingSessionFuturesTarget
    from tinkex.types.futures import TryAgainResponse as TryAgainResponse
    from tinkex.types.futures import UntypedAPIFuture as UntypedAPIFuture
    from tinkex.types.identifiers import ModelID as ModelID
    from tinkex.types.identifiers import RequestID as RequestID
    from tinkex.types.loss import LossFnInputs as LossFnInputs
    from tinkex.types.loss import LossFnOutput as LossFnOutput
    from tinkex.types.loss import LossFnType as LossFnType
    from tinkex.types.model_input import ModelInput as ModelInput
    from tinkex.types.models import CreateModelRequest as CreateModelRequest
    from tinkex.types.models import CreateModelResponse as CreateModelResponse
    from tinkex.types.models import GetInfoRequest as GetInfoRequest
    from tinkex.types.models import GetInfoResponse as GetInfoResponse
    from tinkex.types.models import LoraConfig as LoraConfig
    from tinkex.types.models import ModelData as ModelData
    from tinkex.types.models import UnloadModelRequest as UnloadModelRequest
    from tinkex.types.models import UnloadModelResponse as UnloadModelResponse
    from tinkex.types.optimizer import AdamOptimizerConfig as AdamOptimizerConfig
    from tinkex.types.optimizer import AdamParams as AdamParams
    from tinkex.types.optimizer import DimuonOptimizerConfig as DimuonOptimizerConfig
    from tinkex.types.optimizer import DimuonParams as DimuonParams
    from tinkex.types.optimizer import MuonOptimizerConfig as MuonOptimizerConfig
    from tinkex.types.optimizer import MuonParams as MuonParams
    from tinkex.types.optimizer import OptimizerConfig as OptimizerConfig
    from tinkex.types.optimizer import OptimizerConfigBase as OptimizerConfigBase
    from tinkex.types.optimizer import OptimParams as OptimParams
    from tinkex.types.optimizer import OptimParamsBase as OptimParamsBase
    from tinkex.types.optimizer import OptimStepRequest as OptimStepRequest
    from tinkex.types.optimizer import OptimStepResponse as OptimStepResponse
    from tinkex.types.provenance import PromptProvenanceSpan as PromptProvenanceSpan
    from tinkex.types.provenance import ProvenanceSpan as ProvenanceSpan
    from tinkex.types.provenance import ProvenanceSpans as ProvenanceSpans
    from tinkex.types.provenance import SampledProvenanceSpan as SampledProvenanceSpan
    from tinkex.types.request_error import RequestErrorCategory as RequestErrorCategory
    from tinkex.types.request_error import is_retryable as is_retryable
    from tinkex.types.sample_response import PromptAltTokens as PromptAltTokens
    from tinkex.types.sample_response import SampledSequence as SampledSequence
    from tinkex.types.sample_response import SampleResponse as SampleResponse
    from tinkex.types.samplers import CreateSamplingSessionResponse as CreateSamplingSessionResponse
    from tinkex.types.samplers import GetSamplerResponse as GetSamplerResponse
    from tinkex.types.samplers import JoinSamplingSessionResponse as JoinSamplingSessionResponse
    from tinkex.types.sampling import CreateSamplingSessionRequest as CreateSamplingSessionRequest
    from tinkex.types.sampling import JoinSamplingSessionRequest as JoinSamplingSessionRequest
    from tinkex.types.sampling import SampleRequest as SampleRequest
    from tinkex.types.sampling import SamplingParams as SamplingParams
    from tinkex.types.service import ApiKeyDetails as ApiKeyDetails
    from tinkex.types.service import ApiKeyResponse as ApiKeyResponse
    from tinkex.types.service import AuthTokenResponse as AuthTokenResponse
    from tinkex.types.service import ClientConfigRequest as ClientConfigRequest
    from tinkex.types.service import ClientConfigResponse as ClientConfigResponse
    from tinkex.types.service import ClientDynamicConfigResponse as ClientDynamicConfigResponse
    from tinkex.types.service import GetServerCapabilitiesResponse as GetServerCapabilitiesResponse
    from tinkex.types.service import HealthResponse as HealthResponse
    from tinkex.types.service import OrgDetails as OrgDetails
    from tinkex.types.service import SupportedModel as SupportedModel
    from tinkex.types.service import UserDetails as UserDetails
    from tinkex.types.service import WhoamiResponse as WhoamiResponse
    from tinkex.types.session_search import AccessibleSearchOwner as AccessibleSearchOwner
    from tinkex.types.session_search import ActiveSessionStatusQuery as ActiveSessionStatusQuery
    from tinkex.types.session_search import (
        CancelledSessionStatusQuery as CancelledSessionStatusQuery,
    )
    from tinkex.types.session_search import (
        ClientFinishedSessionStatusQuery as ClientFinishedSessionStatusQuery,
    )
    from tinkex.types.session_search import FailedSessionStatusQuery as FailedSessionStatusQuery
    from tinkex.types.session_search import OwnSearchOwner as OwnSearchOwner
    from tinkex.types.session_search import SearchOwner as SearchOwner
    from tinkex.types.session_search import SessionSearchCursor as SessionSearchCursor
    from tinkex.types.session_search import SessionSearchRequest as SessionSearchRequest
    from tinkex.types.session_search import SessionSearchResponse as SessionSearchResponse
    from tinkex.types.session_search import SessionStatusQuery as SessionStatusQuery
    from tinkex.types.session_search import SessionSummary as SessionSummary
    from tinkex.types.session_search import UserSearchOwner as UserSearchOwner
    from tinkex.types.session_status import ClientSessionFinished as ClientSessionFinished
    from tinkex.types.session_status import ClientSessionFinishErrored as ClientSessionFinishErrored
    from tinkex.types.session_status import (
        ClientSessionFinishInterrupted as ClientSessionFinishInterrupted,
    )
    from tinkex.types.session_status import ClientSessionFinishReason as ClientSessionFinishReason
    from tinkex.types.session_status import (
        ClientSessionFinishReasonType as ClientSessionFinishReasonType,
    )
    from tinkex.types.session_status import ClientSessionFinishSuccess as ClientSessionFinishSuccess
    from tinkex.types.session_status import SessionActive as SessionActive
    from tinkex.types.session_status import SessionCancelled as SessionCancelled
    from tinkex.types.session_status import SessionFailed as SessionFailed
    from tinkex.types.session_status import SessionFailedReason as SessionFailedReason
    from tinkex.types.session_status import SessionFailedRequestReason as SessionFailedRequestReason
    from tinkex.types.session_status import (
        SessionFailedSamplingSessionReason as SessionFailedSamplingSessionReason,
    )
    from tinkex.types.session_status import (
        SessionFailedTrainingRunReason as SessionFailedTrainingRunReason,
    )
    from tinkex.types.session_status import SessionStatus as SessionStatus
    from tinkex.types.sessions import AssignSessionProjectRequest as AssignSessionProjectRequest
    from tinkex.types.sessions import CreateSessionRequest as CreateSessionRequest
    from tinkex.types.sessions import CreateSessionResponse as CreateSessionResponse
    from tinkex.types.sessions import FinishSessionRequest as FinishSessionRequest
    from tinkex.types.sessions import GetSessionResponse as GetSessionResponse
    from tinkex.types.sessions import ListSessionsResponse as ListSessionsResponse
    from tinkex.types.sessions import SessionHeartbeatRequest as SessionHeartbeatRequest
    from tinkex.types.sessions import SessionHeartbeatResponse as SessionHeartbeatResponse
    from tinkex.types.sessions import TraceExportResponse as TraceExportResponse
    from tinkex.types.stop_reason import StopReason as StopReason
    from tinkex.types.telemetry import EventType as EventType
    from tinkex.types.telemetry import GenericEvent as GenericEvent
    from tinkex.types.telemetry import SessionEndEvent as SessionEndEvent
    from tinkex.types.telemetry import SessionStartEvent as SessionStartEvent
    from tinkex.types.telemetry import Severity as Severity
    from tinkex.types.telemetry import TelemetryBatch as TelemetryBatch
    from tinkex.types.telemetry import TelemetryEvent as TelemetryEvent
    from tinkex.types.telemetry import TelemetryResponse as TelemetryResponse
    from tinkex.types.telemetry import TelemetrySendRequest as TelemetrySendRequest
    from tinkex.types.telemetry import UnhandledExceptionEvent as UnhandledExceptionEvent
    from tinkex.types.tensor_data import TensorData as TensorData
    from tinkex.types.tensor_data import TensorDtype as TensorDtype
    from tinkex.types.topk_logprobs import TopkLogprobs as TopkLogprobs
    from tinkex.types.weights import CopyWeightsRequest as CopyWeightsRequest
    from tinkex.types.weights import CopyWeightsResponse as CopyWeightsResponse
    from tinkex.types.weights import ExternalWeightsUrlsResponse as ExternalWeightsUrlsResponse
    from tinkex.types.weights import LoadWeightsRequest as LoadWeightsRequest
    from tinkex.types.weights import LoadWeightsResponse as LoadWeightsResponse
    from tinkex.types.weights import SaveWeightsExternalRequest as SaveWeightsExternalRequest
    from tinkex.types.weights import SaveWeightsExternalResponse as SaveWeightsExternalResponse
    from tinkex.types.weights import (
        SaveWeightsExternalResponseInternal as SaveWeightsExternalResponseInternal,
    )
    from tinkex.types.weights import SaveWeightsForSamplerRequest as SaveWeightsForSamplerRequest
    from tinkex.types.weights import SaveWeightsForSamplerResponse as SaveWeightsForSamplerResponse
    from tinkex.types.weights import (
        SaveWeightsForSamplerResponseInternal as SaveWeightsForSamplerResponseInternal,
    )
    from tinkex.types.weights import SaveWeightsRequest as SaveWeightsRequest
    from tinkex.types.weights import SaveWeightsResponse as SaveWeightsResponse
    from tinkex.types.weights import WeightsInfoRequest as WeightsInfoRequest
    from tinkex.types.weights import WeightsInfoResponse as WeightsInfoResponse

_MODULES: dict[str, tuple[str, ...]] = {
    "audit": (
        "AuditLogEntry",
        "AuditLogResponse",
    ),
    "billing": (
        "BillingEventInfo",
        "BillingUsageEvent",
        "BillingUsageResponse",
        "BillingUsageSession",
        "CheckpointBillingEvent",
        "CurrentCheckpointStorageUsageItem",
        "CurrentCheckpointStorageUsageResponse",
        "GetBillingUsageRequest",
        "GetCurrentCheckpointStorageUsageRequest",
        "SamplingPrefillBillingEvent",
        "SamplingSampleBillingEvent",
        "StorageBillingEvent",
        "TrainingBillingEvent",
    ),
    "checkpoints": (
        "Checkpoint",
        "CheckpointArchiveUrlResponse",
        "CheckpointType",
        "CheckpointsListResponse",
        "Cursor",
        "ParsedCheckpointTinkerPath",
        "SetCheckpointTtlRequest",
        "TrainingRun",
        "TrainingRunsResponse",
    ),
    "chunks": (
        "DmelChunk",
        "EncodedTextChunk",
        "ImageAssetPointerChunk",
        "ImageChunk",
        "ModelInputChunk",
    ),
    "custom_loss": (
        "CreateCustomLossRequest",
        "CreateCustomLossResponse",
        "CustomLossGraph",
        "CustomLossInput",
        "CustomLossInputRank",
        "CustomLossNode",
    ),
    "datum": ("Datum",),
    "forward_backward": (
        "ForwardBackwardInput",
        "ForwardBackwardOutput",
        "ForwardBackwardRequest",
        "ForwardRequest",
    ),
    "futures": (
        "CancelFutureRequest",
        "CompleteMetadataResponse",
        "FutureCompletion",
        "FutureFailed",
        "FutureFinished",
        "FutureRetrieveRequest",
        "FutureRetrieveResponse",
        "FuturesRetrieveRequest",
        "FuturesRetrieveResponse",
        "QueueState",
        "RequestFailedResponse",
        "SamplingSessionFuturesTarget",
        "TryAgainResponse",
        "UntypedAPIFuture",
    ),
    "identifiers": (
        "ModelID",
        "RequestID",
    ),
    "loss": (
        "LossFnInputs",
        "LossFnOutput",
        "LossFnType",
    ),
    "model_input": ("ModelInput",),
    "models": (
        "CreateModelRequest",
        "CreateModelResponse",
        "GetInfoRequest",
        "GetInfoResponse",
        "LoraConfig",
        "ModelData",
        "UnloadModelRequest",
        "UnloadModelResponse",
    ),
    "optimizer": (
        "AdamOptimizerConfig",
        "AdamParams",
        "DimuonOptimizerConfig",
        "DimuonParams",
        "MuonOptimizerConfig",
        "MuonParams",
        "OptimParams",
        "OptimParamsBase",
        "OptimStepRequest",
        "OptimStepResponse",
        "OptimizerConfig",
        "OptimizerConfigBase",
    ),
    "provenance": (
        "PromptProvenanceSpan",
        "ProvenanceSpan",
        "ProvenanceSpans",
        "SampledProvenanceSpan",
    ),
    "request_error": (
        "RequestErrorCategory",
        "is_retryable",
    ),
    "sample_response": (
        "PromptAltTokens",
        "SampleResponse",
        "SampledSequence",
    ),
    "samplers": (
        "CreateSamplingSessionResponse",
        "GetSamplerResponse",
        "JoinSamplingSessionResponse",
    ),
    "sampling": (
        "CreateSamplingSessionRequest",
        "JoinSamplingSessionRequest",
        "SampleRequest",
        "SamplingParams",
    ),
    "service": (
        "ApiKeyDetails",
        "ApiKeyResponse",
        "AuthTokenResponse",
        "ClientConfigRequest",
        "ClientConfigResponse",
        "ClientDynamicConfigResponse",
        "GetServerCapabilitiesResponse",
        "HealthResponse",
        "OrgDetails",
        "SupportedModel",
        "UserDetails",
        "WhoamiResponse",
    ),
    "session_search": (
        "AccessibleSearchOwner",
        "ActiveSessionStatusQuery",
        "CancelledSessionStatusQuery",
        "ClientFinishedSessionStatusQuery",
        "FailedSessionStatusQuery",
        "OwnSearchOwner",
        "SearchOwner",
        "SessionSearchCursor",
        "SessionSearchRequest",
        "SessionSearchResponse",
        "SessionStatusQuery",
        "SessionSummary",
        "UserSearchOwner",
    ),
    "session_status": (
        "ClientSessionFinishErrored",
        "ClientSessionFinishInterrupted",
        "ClientSessionFinishReason",
        "ClientSessionFinishReasonType",
        "ClientSessionFinishSuccess",
        "ClientSessionFinished",
        "SessionActive",
        "SessionCancelled",
        "SessionFailed",
        "SessionFailedReason",
        "SessionFailedRequestReason",
        "SessionFailedSamplingSessionReason",
        "SessionFailedTrainingRunReason",
        "SessionStatus",
    ),
    "sessions": (
        "AssignSessionProjectRequest",
        "CreateSessionRequest",
        "CreateSessionResponse",
        "FinishSessionRequest",
        "GetSessionResponse",
        "ListSessionsResponse",
        "SessionHeartbeatRequest",
        "SessionHeartbeatResponse",
        "TraceExportResponse",
    ),
    "stop_reason": ("StopReason",),
    "telemetry": (
        "EventType",
        "GenericEvent",
        "SessionEndEvent",
        "SessionStartEvent",
        "Severity",
        "TelemetryBatch",
        "TelemetryEvent",
        "TelemetryResponse",
        "TelemetrySendRequest",
        "UnhandledExceptionEvent",
    ),
    "tensor_data": (
        "TensorData",
        "TensorDtype",
    ),
    "topk_logprobs": ("TopkLogprobs",),
    "weights": (
        "CopyWeightsRequest",
        "CopyWeightsResponse",
        "ExternalWeightsUrlsResponse",
        "LoadWeightsRequest",
        "LoadWeightsResponse",
        "SaveWeightsExternalRequest",
        "SaveWeightsExternalResponse",
        "SaveWeightsExternalResponseInternal",
        "SaveWeightsForSamplerRequest",
        "SaveWeightsForSamplerResponse",
        "SaveWeightsForSamplerResponseInternal",
        "SaveWeightsRequest",
        "SaveWeightsResponse",
        "WeightsInfoRequest",
        "WeightsInfoResponse",
    ),
}
_OWNER = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_OWNER)


def __getattr__(name: str) -> Any:
    if (module := _OWNER.get(name)) is None:
        raise AttributeError(f"module 'tinkex.types' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"tinkex.types.{module}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
