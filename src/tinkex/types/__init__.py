"""The vocabulary of the API: every request, result and value, one module per noun.

Names load when first touched: `from tinkex.types import Datum` brings in numpy but not pydantic.
Nothing here knows how a value travels; that is `tinkex.wire`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinkex.contract.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from tinkex.types.account.audit import AuditLogEntry as AuditLogEntry
    from tinkex.types.account.audit import AuditLogResponse as AuditLogResponse
    from tinkex.types.account.billing import BillingEventInfo as BillingEventInfo
    from tinkex.types.account.billing import BillingUsageEvent as BillingUsageEvent
    from tinkex.types.account.billing import BillingUsageResponse as BillingUsageResponse
    from tinkex.types.account.billing import BillingUsageSession as BillingUsageSession
    from tinkex.types.account.billing import CheckpointBillingEvent as CheckpointBillingEvent
    from tinkex.types.account.billing import (
        CurrentCheckpointStorageUsageItem as CurrentCheckpointStorageUsageItem,
    )
    from tinkex.types.account.billing import (
        CurrentCheckpointStorageUsageResponse as CurrentCheckpointStorageUsageResponse,
    )
    from tinkex.types.account.billing import GetBillingUsageRequest as GetBillingUsageRequest
    from tinkex.types.account.billing import (
        GetCurrentCheckpointStorageUsageRequest as GetCurrentCheckpointStorageUsageRequest,
    )
    from tinkex.types.account.billing import (
        SamplingPrefillBillingEvent as SamplingPrefillBillingEvent,
    )
    from tinkex.types.account.billing import (
        SamplingSampleBillingEvent as SamplingSampleBillingEvent,
    )
    from tinkex.types.account.billing import StorageBillingEvent as StorageBillingEvent
    from tinkex.types.account.billing import TrainingBillingEvent as TrainingBillingEvent
    from tinkex.types.account.checkpoints import Checkpoint as Checkpoint
    from tinkex.types.account.checkpoints import (
        CheckpointArchiveUrlResponse as CheckpointArchiveUrlResponse,
    )
    from tinkex.types.account.checkpoints import CheckpointName as CheckpointName
    from tinkex.types.account.checkpoints import CheckpointNamesResponse as CheckpointNamesResponse
    from tinkex.types.account.checkpoints import CheckpointsListResponse as CheckpointsListResponse
    from tinkex.types.account.checkpoints import CheckpointType as CheckpointType
    from tinkex.types.account.checkpoints import Cursor as Cursor
    from tinkex.types.account.checkpoints import (
        ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath,
    )
    from tinkex.types.account.checkpoints import RunWorker as RunWorker
    from tinkex.types.account.checkpoints import SetCheckpointTtlRequest as SetCheckpointTtlRequest
    from tinkex.types.account.checkpoints import TrainingRun as TrainingRun
    from tinkex.types.account.checkpoints import TrainingRunsResponse as TrainingRunsResponse
    from tinkex.types.data.chunks import DmelChunk as DmelChunk
    from tinkex.types.data.chunks import EncodedTextChunk as EncodedTextChunk
    from tinkex.types.data.chunks import ImageAssetPointerChunk as ImageAssetPointerChunk
    from tinkex.types.data.chunks import ImageChunk as ImageChunk
    from tinkex.types.data.chunks import ModelInputChunk as ModelInputChunk
    from tinkex.types.data.datum import Datum as Datum
    from tinkex.types.data.model_input import ModelInput as ModelInput
    from tinkex.types.data.provenance import PromptProvenanceSpan as PromptProvenanceSpan
    from tinkex.types.data.provenance import ProvenanceSpan as ProvenanceSpan
    from tinkex.types.data.provenance import ProvenanceSpans as ProvenanceSpans
    from tinkex.types.data.provenance import SampledProvenanceSpan as SampledProvenanceSpan
    from tinkex.types.data.tensor_data import TensorData as TensorData
    from tinkex.types.data.tensor_data import TensorDtype as TensorDtype
    from tinkex.types.data.topk_logprobs import TopkLogprobs as TopkLogprobs
    from tinkex.types.sampling.request import (
        CreateSamplingSessionRequest as CreateSamplingSessionRequest,
    )
    from tinkex.types.sampling.request import (
        JoinSamplingSessionRequest as JoinSamplingSessionRequest,
    )
    from tinkex.types.sampling.request import SampleRequest as SampleRequest
    from tinkex.types.sampling.request import SamplingParams as SamplingParams
    from tinkex.types.sampling.response import PromptAltTokens as PromptAltTokens
    from tinkex.types.sampling.response import SampledSequence as SampledSequence
    from tinkex.types.sampling.response import SampleResponse as SampleResponse
    from tinkex.types.sampling.samplers import (
        CreateSamplingSessionResponse as CreateSamplingSessionResponse,
    )
    from tinkex.types.sampling.samplers import GetSamplerResponse as GetSamplerResponse
    from tinkex.types.sampling.samplers import (
        JoinSamplingSessionResponse as JoinSamplingSessionResponse,
    )
    from tinkex.types.sampling.snapshot import WeightsSnapshot as WeightsSnapshot
    from tinkex.types.sampling.stop_reason import StopReason as StopReason
    from tinkex.types.sampling.trajectory import Trajectory as Trajectory
    from tinkex.types.sampling.trajectory import TrajectoryAnswer as TrajectoryAnswer
    from tinkex.types.sampling.trajectory import TrajectorySequence as TrajectorySequence
    from tinkex.types.service.futures import CancelFutureRequest as CancelFutureRequest
    from tinkex.types.service.futures import CompleteMetadataResponse as CompleteMetadataResponse
    from tinkex.types.service.futures import FutureCompletion as FutureCompletion
    from tinkex.types.service.futures import FutureFailed as FutureFailed
    from tinkex.types.service.futures import FutureFinished as FutureFinished
    from tinkex.types.service.futures import FutureRetrieveRequest as FutureRetrieveRequest
    from tinkex.types.service.futures import FutureRetrieveResponse as FutureRetrieveResponse
    from tinkex.types.service.futures import FuturesRetrieveRequest as FuturesRetrieveRequest
    from tinkex.types.service.futures import FuturesRetrieveResponse as FuturesRetrieveResponse
    from tinkex.types.service.futures import QueueState as QueueState
    from tinkex.types.service.futures import RequestFailedResponse as RequestFailedResponse
    from tinkex.types.service.futures import (
        SamplingSessionFuturesTarget as SamplingSessionFuturesTarget,
    )
    from tinkex.types.service.futures import TryAgainResponse as TryAgainResponse
    from tinkex.types.service.futures import UntypedAPIFuture as UntypedAPIFuture
    from tinkex.types.service.identifiers import ModelID as ModelID
    from tinkex.types.service.identifiers import RequestID as RequestID
    from tinkex.types.service.request_error import RequestErrorCategory as RequestErrorCategory
    from tinkex.types.service.request_error import is_retryable as is_retryable
    from tinkex.types.service.server import ApiKeyDetails as ApiKeyDetails
    from tinkex.types.service.server import ApiKeyResponse as ApiKeyResponse
    from tinkex.types.service.server import AuthTokenResponse as AuthTokenResponse
    from tinkex.types.service.server import ClientConfigRequest as ClientConfigRequest
    from tinkex.types.service.server import ClientConfigResponse as ClientConfigResponse
    from tinkex.types.service.server import (
        ClientDynamicConfigResponse as ClientDynamicConfigResponse,
    )
    from tinkex.types.service.server import (
        GetServerCapabilitiesResponse as GetServerCapabilitiesResponse,
    )
    from tinkex.types.service.server import HealthResponse as HealthResponse
    from tinkex.types.service.server import OrgDetails as OrgDetails
    from tinkex.types.service.server import SupportedModel as SupportedModel
    from tinkex.types.service.server import UserDetails as UserDetails
    from tinkex.types.service.server import WhoamiResponse as WhoamiResponse
    from tinkex.types.service.session_search import AccessibleSearchOwner as AccessibleSearchOwner
    from tinkex.types.service.session_search import (
        ActiveSessionStatusQuery as ActiveSessionStatusQuery,
    )
    from tinkex.types.service.session_search import (
        CancelledSessionStatusQuery as CancelledSessionStatusQuery,
    )
    from tinkex.types.service.session_search import (
        ClientFinishedSessionStatusQuery as ClientFinishedSessionStatusQuery,
    )
    from tinkex.types.service.session_search import (
        FailedSessionStatusQuery as FailedSessionStatusQuery,
    )
    from tinkex.types.service.session_search import OwnSearchOwner as OwnSearchOwner
    from tinkex.types.service.session_search import SearchOwner as SearchOwner
    from tinkex.types.service.session_search import SessionSearchCursor as SessionSearchCursor
    from tinkex.types.service.session_search import SessionSearchRequest as SessionSearchRequest
    from tinkex.types.service.session_search import SessionSearchResponse as SessionSearchResponse
    from tinkex.types.service.session_search import SessionStatusQuery as SessionStatusQuery
    from tinkex.types.service.session_search import SessionSummary as SessionSummary
    from tinkex.types.service.session_search import UserSearchOwner as UserSearchOwner
    from tinkex.types.service.session_status import ClientSessionFinished as ClientSessionFinished
    from tinkex.types.service.session_status import (
        ClientSessionFinishErrored as ClientSessionFinishErrored,
    )
    from tinkex.types.service.session_status import (
        ClientSessionFinishInterrupted as ClientSessionFinishInterrupted,
    )
    from tinkex.types.service.session_status import (
        ClientSessionFinishReason as ClientSessionFinishReason,
    )
    from tinkex.types.service.session_status import (
        ClientSessionFinishReasonType as ClientSessionFinishReasonType,
    )
    from tinkex.types.service.session_status import (
        ClientSessionFinishSuccess as ClientSessionFinishSuccess,
    )
    from tinkex.types.service.session_status import SessionActive as SessionActive
    from tinkex.types.service.session_status import SessionCancelled as SessionCancelled
    from tinkex.types.service.session_status import SessionFailed as SessionFailed
    from tinkex.types.service.session_status import SessionFailedReason as SessionFailedReason
    from tinkex.types.service.session_status import (
        SessionFailedRequestReason as SessionFailedRequestReason,
    )
    from tinkex.types.service.session_status import (
        SessionFailedSamplingSessionReason as SessionFailedSamplingSessionReason,
    )
    from tinkex.types.service.session_status import (
        SessionFailedTrainingRunReason as SessionFailedTrainingRunReason,
    )
    from tinkex.types.service.session_status import SessionStatus as SessionStatus
    from tinkex.types.service.sessions import (
        AssignSessionProjectRequest as AssignSessionProjectRequest,
    )
    from tinkex.types.service.sessions import CreateSessionRequest as CreateSessionRequest
    from tinkex.types.service.sessions import CreateSessionResponse as CreateSessionResponse
    from tinkex.types.service.sessions import FinishSessionRequest as FinishSessionRequest
    from tinkex.types.service.sessions import GetSessionResponse as GetSessionResponse
    from tinkex.types.service.sessions import ListSessionsResponse as ListSessionsResponse
    from tinkex.types.service.sessions import SessionHeartbeatRequest as SessionHeartbeatRequest
    from tinkex.types.service.sessions import SessionHeartbeatResponse as SessionHeartbeatResponse
    from tinkex.types.service.sessions import TraceExportResponse as TraceExportResponse
    from tinkex.types.service.telemetry import EventType as EventType
    from tinkex.types.service.telemetry import GenericEvent as GenericEvent
    from tinkex.types.service.telemetry import SessionEndEvent as SessionEndEvent
    from tinkex.types.service.telemetry import SessionStartEvent as SessionStartEvent
    from tinkex.types.service.telemetry import Severity as Severity
    from tinkex.types.service.telemetry import TelemetryBatch as TelemetryBatch
    from tinkex.types.service.telemetry import TelemetryEvent as TelemetryEvent
    from tinkex.types.service.telemetry import TelemetryResponse as TelemetryResponse
    from tinkex.types.service.telemetry import TelemetrySendRequest as TelemetrySendRequest
    from tinkex.types.service.telemetry import UnhandledExceptionEvent as UnhandledExceptionEvent
    from tinkex.types.training.custom_loss import CreateCustomLossRequest as CreateCustomLossRequest
    from tinkex.types.training.custom_loss import (
        CreateCustomLossResponse as CreateCustomLossResponse,
    )
    from tinkex.types.training.custom_loss import CustomLossGraph as CustomLossGraph
    from tinkex.types.training.custom_loss import CustomLossInput as CustomLossInput
    from tinkex.types.training.custom_loss import CustomLossInputRank as CustomLossInputRank
    from tinkex.types.training.custom_loss import CustomLossNode as CustomLossNode
    from tinkex.types.training.forward_backward import ForwardBackwardInput as ForwardBackwardInput
    from tinkex.types.training.forward_backward import (
        ForwardBackwardOutput as ForwardBackwardOutput,
    )
    from tinkex.types.training.forward_backward import (
        ForwardBackwardRequest as ForwardBackwardRequest,
    )
    from tinkex.types.training.forward_backward import ForwardRequest as ForwardRequest
    from tinkex.types.training.loss import LossFnInputs as LossFnInputs
    from tinkex.types.training.loss import LossFnOutput as LossFnOutput
    from tinkex.types.training.loss import LossFnType as LossFnType
    from tinkex.types.training.models import CreateModelRequest as CreateModelRequest
    from tinkex.types.training.models import CreateModelResponse as CreateModelResponse
    from tinkex.types.training.models import GetInfoRequest as GetInfoRequest
    from tinkex.types.training.models import GetInfoResponse as GetInfoResponse
    from tinkex.types.training.models import LoraConfig as LoraConfig
    from tinkex.types.training.models import ModelData as ModelData
    from tinkex.types.training.models import UnloadModelRequest as UnloadModelRequest
    from tinkex.types.training.models import UnloadModelResponse as UnloadModelResponse
    from tinkex.types.training.optimizer import *  # noqa: F403
    from tinkex.types.training.weights import CopyWeightsRequest as CopyWeightsRequest
    from tinkex.types.training.weights import CopyWeightsResponse as CopyWeightsResponse
    from tinkex.types.training.weights import (
        ExternalWeightsUrlsResponse as ExternalWeightsUrlsResponse,
    )
    from tinkex.types.training.weights import LoadWeightsRequest as LoadWeightsRequest
    from tinkex.types.training.weights import LoadWeightsResponse as LoadWeightsResponse
    from tinkex.types.training.weights import (
        SaveWeightsExternalRequest as SaveWeightsExternalRequest,
    )
    from tinkex.types.training.weights import (
        SaveWeightsExternalResponse as SaveWeightsExternalResponse,
    )
    from tinkex.types.training.weights import (
        SaveWeightsExternalResponseInternal as SaveWeightsExternalResponseInternal,
    )
    from tinkex.types.training.weights import (
        SaveWeightsForSamplerRequest as SaveWeightsForSamplerRequest,
    )
    from tinkex.types.training.weights import (
        SaveWeightsForSamplerResponse as SaveWeightsForSamplerResponse,
    )
    from tinkex.types.training.weights import (
        SaveWeightsForSamplerResponseInternal as SaveWeightsForSamplerResponseInternal,
    )
    from tinkex.types.training.weights import SaveWeightsRequest as SaveWeightsRequest
    from tinkex.types.training.weights import SaveWeightsResponse as SaveWeightsResponse
    from tinkex.types.training.weights import WeightsInfoRequest as WeightsInfoRequest
    from tinkex.types.training.weights import WeightsInfoResponse as WeightsInfoResponse

# Adam, Dimuon of the hosted service, and whatever else is declared.
_OPTIMIZERS = ("Dimuon", *(each.__name__.removesuffix("Params") for each in OPTIMIZERS.values()))
_MODULES: dict[str, tuple[str, ...]] = {
    "account.audit": (
        "AuditLogEntry",
        "AuditLogResponse",
    ),
    "account.billing": (
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
    "account.checkpoints": (
        "CheckpointName",
        "CheckpointNamesResponse",
        "Checkpoint",
        "CheckpointArchiveUrlResponse",
        "CheckpointType",
        "CheckpointsListResponse",
        "Cursor",
        "ParsedCheckpointTinkerPath",
        "SetCheckpointTtlRequest",
        "RunWorker",
        "TrainingRun",
        "TrainingRunsResponse",
    ),
    "data.chunks": (
        "DmelChunk",
        "EncodedTextChunk",
        "ImageAssetPointerChunk",
        "ImageChunk",
        "ModelInputChunk",
    ),
    "training.custom_loss": (
        "CreateCustomLossRequest",
        "CreateCustomLossResponse",
        "CustomLossGraph",
        "CustomLossInput",
        "CustomLossInputRank",
        "CustomLossNode",
    ),
    "data.datum": ("Datum",),
    "training.forward_backward": (
        "ForwardBackwardInput",
        "ForwardBackwardOutput",
        "ForwardBackwardRequest",
        "ForwardRequest",
    ),
    "service.futures": (
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
    "service.identifiers": (
        "ModelID",
        "RequestID",
    ),
    "training.loss": (
        "LossFnInputs",
        "LossFnOutput",
        "LossFnType",
    ),
    "data.model_input": ("ModelInput",),
    "training.models": (
        "CreateModelRequest",
        "CreateModelResponse",
        "GetInfoRequest",
        "GetInfoResponse",
        "LoraConfig",
        "ModelData",
        "UnloadModelRequest",
        "UnloadModelResponse",
    ),
    "training.optimizer": (
        *(f"{name}Params" for name in _OPTIMIZERS),
        *(f"{name}OptimizerConfig" for name in _OPTIMIZERS),
        "OptimParams",
        "OptimParamsBase",
        "OptimStepRequest",
        "OptimStepResponse",
        "OptimizerConfig",
        "OptimizerConfigBase",
    ),
    "data.provenance": (
        "PromptProvenanceSpan",
        "ProvenanceSpan",
        "ProvenanceSpans",
        "SampledProvenanceSpan",
    ),
    "service.request_error": (
        "RequestErrorCategory",
        "is_retryable",
    ),
    "sampling.response": (
        "PromptAltTokens",
        "SampleResponse",
        "SampledSequence",
    ),
    "sampling.snapshot": ("WeightsSnapshot",),
    "sampling.samplers": (
        "CreateSamplingSessionResponse",
        "GetSamplerResponse",
        "JoinSamplingSessionResponse",
    ),
    "sampling.request": (
        "CreateSamplingSessionRequest",
        "JoinSamplingSessionRequest",
        "SampleRequest",
        "SamplingParams",
    ),
    "service.server": (
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
    "service.session_search": (
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
    "service.session_status": (
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
    "service.sessions": (
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
    "sampling.stop_reason": ("StopReason",),
    "sampling.trajectory": ("Trajectory", "TrajectoryAnswer", "TrajectorySequence"),
    "service.telemetry": (
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
    "data.tensor_data": (
        "TensorData",
        "TensorDtype",
    ),
    "data.topk_logprobs": ("TopkLogprobs",),
    "training.weights": (
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
