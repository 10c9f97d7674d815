"""Promises: a request that was accepted, and the ways its result can be asked for."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import Field, model_validator

from tinkex.types.fields.bounds import Id, Ids, Number
from tinkex.types.fields.identifiers import ModelID, RequestID
from tinkex.types.fields.message import Listing, Request, Response, member_of
from tinkex.types.service.request_error import RequestErrorCategory


class QueueState(StrEnum):
    """Why a request waits. A text this SDK does not know reads as `UNKNOWN`."""

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> QueueState:
        folded = str(value).lower()
        return next((member for member in cls if member.value == folded), cls.UNKNOWN)


class UntypedAPIFuture(Response):
    """The promise a server gives for every submitted request."""

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: Listing[str] | None = None


class FutureRetrieveRequest(Request):
    """Ask for a result. With `allow_metadata_only` a large one may first answer with its size."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(Request):
    """Say that nobody waits for this result any more."""

    request_id: Id


class TryAgainResponse(Response):
    """Not ready yet. `queue_state_reason` says why in words."""

    type: Literal["try_again"] = "try_again"
    request_id: RequestID
    queue_state: Annotated[QueueState, member_of(QueueState)] = QueueState.ACTIVE
    queue_state_reason: str | None = None


class CompleteMetadataResponse(Response):
    """Ready, and this large; ask again with `allow_metadata_only` off."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class RequestFailedResponse(Response):
    """The request ended in an error; `category` says who can fix it.

    Also read from the form in which `error` is an object with `message` and `category`.
    """

    error: str
    category: Annotated[RequestErrorCategory, member_of(RequestErrorCategory)]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        error, category = value.get("error"), value.get("category")
        if isinstance(error, dict):
            category = error.get("category", category)
            error = error.get("message") or error.get("error") or orjson.dumps(error).decode()
        error = str(error or "the server gave no reason")
        return {**value, "error": error, "category": category or RequestErrorCategory.Unknown}


class FuturePendingResponse(Response):
    """Not ready yet, from servers that say how it stands as a `status`."""

    status: Literal["pending"] = "pending"
    request_id: RequestID | None = None
    queue_state: Annotated[QueueState, member_of(QueueState)] | None = None
    queue_state_reason: str | None = None


class FutureCompletedResponse(Response):
    """Ready, with the result inside; from servers that say how it stands as a `status`."""

    status: Literal["completed"] = "completed"
    request_id: RequestID | None = None
    result: dict[str, Any]


class FutureFailedResponse(RequestFailedResponse):
    """An error, from servers that say how it stands as a `status`."""

    status: Literal["failed"] = "failed"
    request_id: RequestID | None = None


class SamplingSessionFuturesTarget(Request):
    """All results of one copy of one sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Number = 0


class FuturesRetrieveRequest(Request):
    """Ask which of many results are ready; the server may forget `retrieved_request_ids`."""

    target: SamplingSessionFuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0, le=1e9)] | None = None
    retrieved_request_ids: Ids = []
    inline_results: bool | None = None
    """Send the results along, as frames; Tinkex servers only."""


class FutureFinished(Response):
    """A result that is ready, with its size when the server says it."""

    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


class FutureFailed(Response):
    """A request that ended in an error; fetch it to learn which."""

    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion: TypeAlias = Annotated[FutureFinished | FutureFailed, Field(discriminator="state")]


class FuturesRetrieveResponse(Response):
    """The requests that came to an end since the last cursor."""

    completions: Listing[FutureCompletion]
    cursor: int
