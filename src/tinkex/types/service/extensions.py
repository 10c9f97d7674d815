"""Messages only Tinkex servers know: samples by the batch, metrics, short names, trajectories.

What changes how a client works is announced by flags in the client config, so that no other client
meets it; the rest is for whoever asks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from tinkex.types.fields.bounds import INT32, Id, Number, Path, listing, text
from tinkex.types.fields.message import Listing, Request, Response
from tinkex.types.sampling.request import SampleRequest


class SampleBatchRequest(Request):
    """Many samples in one call. Each is judged on its own: one refusal does not stop the others."""

    requests: Annotated[list[SkipValidation[SampleRequest]], *listing(1024)]


class SampleBatchResponse(Response):
    """A promise or a refusal for each request, in their order."""

    promises: Listing[dict[str, Any]]


class ProcessRequest(Request):
    """A process of this machine begins or ends its use of the server."""

    pid: Annotated[int, Field(ge=1, le=INT32)]


MAX_METRIC = 1e300
"""Curves are sums and means of several numbers, which must stay finite."""


class LogMetricsRequest(Request):
    """Numbers that a client measured itself, to be drawn beside those the server measures."""

    model_id: Id
    metrics: Annotated[
        dict[Annotated[str, text(100, 1)], Annotated[float, Field(ge=-MAX_METRIC, le=MAX_METRIC)]],
        Field(max_length=200),
    ]
    step: Number | None = None
    """None: the last step that the server has seen."""


class LogMetricsResponse(Response):
    """The numbers are kept."""

    type: Literal["log_metrics"] = "log_metrics"


class CancelFutureResponse(Response):
    """The outcome of a request to cancel."""

    status: Literal["cancelled", "finished", "gone", "not_cancellable"]


class NameCheckpointRequest(Request):
    """Give a checkpoint a short name; one that is in use moves to it."""

    name: Annotated[str, text(200, 1)]
    path: Path


class RemoveNameResponse(Response):
    """The name that was taken back; its checkpoint stays."""

    name: str


class DeleteTrajectoryResponse(Response):
    """How many recorded answers were removed."""

    trajectory_id: str
    num_answers: int
