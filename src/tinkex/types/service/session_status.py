"""How a session stands or ended."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tinkex.types.fields.message import Response

ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]


class ClientSessionFinishSuccess(Response):
    """The client left its `with` block normally."""

    type: Literal["success"] = "success"


class ClientSessionFinishErrored(Response):
    """The client left on an exception."""

    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(Response):
    """The client was interrupted, as by Ctrl-C."""

    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason: TypeAlias = Annotated[
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted,
    Field(discriminator="type"),
]


class SessionActive(Response):
    """Still open."""

    type: Literal["active"] = "active"


class SessionCancelled(Response):
    """Cancelled from outside."""

    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(Response):
    """The client said it was done, and how it went."""

    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailedRequestReason(Response):
    """A request failed for good."""

    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Response):
    """A training run can no longer be used."""

    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(Response):
    """A sampling session can no longer be used."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = Annotated[
    SessionFailedRequestReason
    | SessionFailedTrainingRunReason
    | SessionFailedSamplingSessionReason,
    Field(discriminator="type"),
]


class SessionFailed(Response):
    """The server ended the session; `category` says whose fault it was."""

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


SessionStatus: TypeAlias = Annotated[
    SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive,
    Field(discriminator="type"),
]
