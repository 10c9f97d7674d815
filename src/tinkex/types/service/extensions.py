"""Messages only Tinkex servers know: samples by the batch, and which processes use a server.

A server announces them by flags in its client config, so that no other client meets them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from tinkex.types._bounds import INT32, Id, Number, listing, text
from tinkex.types._models import Listing, Request, Response
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
    """What became of a request to cancel."""

    status: Literal["cancelled", "finished", "gone", "not_cancellable"]
