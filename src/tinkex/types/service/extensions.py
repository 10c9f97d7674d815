"""Messages only Tinkex servers know: samples by the batch, metrics, short names, trajectories.

What changes how a client works is announced by flags in the client config, so that no other client
meets it; the rest is for whoever asks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SkipValidation

from tinkex.contract.bounds import Between
from tinkex.contract.cost import NOTHING
from tinkex.types.account.checkpoints import is_tinker_path
from tinkex.types.fields.bounds import INT32, Id, Number, Path, Plain, listing, text
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

    pid: Annotated[int, Between(1, INT32, becomes=NOTHING)]


MAX_RUN_NAME = 200


def _one_line(name: str) -> str:
    """Refuse names that a list could not show, or that mean something else already."""
    if not name.isprintable() or name != name.strip():
        raise ValueError("must be one line of printable text, without spaces around it")
    if is_tinker_path(name):
        raise ValueError("must not begin with tinker://, which is how paths of checkpoints begin")
    return name


def _one_tag(tag: str) -> str:
    if "," in tag:
        raise ValueError("must have no comma, which stands between tags; give each tag by itself")
    return tag


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


class Continuation(Request):
    """The run that another one goes on from, after so many steps."""

    run_id: Id
    step: Number


class DescribeRunRequest(Request):
    """Say what a run is called and what it was started with; what is left out stays as it is."""

    name: Annotated[str, text(MAX_RUN_NAME), AfterValidator(_one_line)] | None = None
    """Empty: it goes by the name of its session again."""
    note: Annotated[str, text(10_000)] | None = None
    tags: (
        Annotated[list[Annotated[str, text(100, 1), AfterValidator(_one_tag)]], *listing(64)] | None
    ) = None
    settings: Plain | None = None
    """Added to those that it has; one of the same name is replaced."""
    continues: Continuation | None = None
    """Makes it the last segment of that run; said once."""


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
