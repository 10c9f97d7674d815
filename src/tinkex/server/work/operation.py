"""The shape of an operation: what one kind of numbered request means, from arrival to answer.

An operation is asked in the order in which things happen. `peek` reads the model and the number:
a request is numbered even when the rest of it is refused, so that the stream of a client goes on
after its mistake. `check` judges the rest and takes every decision that is taken on arrival; `pack`
is what the journal keeps of it. `job` is what the engine runs, now or again after a crash, and
`conclude` what is true once it has run.

One object of each kind serves all models, so it keeps nothing of a request: that is in the
arguments. Order, repeats, retries and recovery are the lane's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import orjson

from tinkex.engine.jobs import Job, Result
from tinkex.errors import InvalidInputError
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.futures import Outcome
from tinkex.store import Model, UsageCount, UsageKind, User
from tinkex.wire import requests
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.requests import Opened

Checked = TypeVar("Checked")


@dataclass(frozen=True, slots=True)
class OperationAddress:
    model_id: str | None
    """None: the request makes a model."""
    seq_id: int | None
    """None: the next number, in order of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRun:
    """A run of a request: the model as it is then, and the names to run under."""

    model: Model
    project_id: str | None
    key_id: int | None
    request_id: str
    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The outcome of a request whose job has run, and what follows from it."""

    outcome: Outcome
    usage: tuple[UsageCount, ...] = ()
    model: Model | None = None
    """The model, when the job changed what it is."""


class Operation(ABC, Generic[Checked]):
    name: ClassVar[str]
    """Of its row in `wire.endpoints`, and in the journal."""
    clears_gradients: ClassVar[bool] = False
    """It leaves no gathered gradients behind: a good moment for a snapshot."""
    part_of_step: ClassVar[str] = "save_time_s"
    """What its time counts as in the curves of a run, one of `curves.PARTS`."""
    is_unnumbered: ClassVar[bool] = False
    """Clients send it beside the calls that they number: it takes no number of theirs."""
    is_snapshot_forced: ClassVar[bool] = False
    """It depends on something that may be gone at a replay, so the state is saved right after."""

    def __init__(self, deps: Dependencies) -> None:
        self.deps = deps
        row = ENDPOINTS[self.name]
        self.changes_state = row.changes_state
        self.is_barrier = row.is_barrier

    # ------------------------------------------------------------------------ on arrival

    def open(self, raw: bytes, content_type: str) -> Opened:
        return requests.open_body(self.name, raw, content_type)

    def peek(self, opened: Opened) -> OperationAddress:
        """The model and the number of a request, whatever else is wrong with it."""
        address = opened.address()
        return OperationAddress(address.model_id, address.seq_id)

    @abstractmethod
    def identity(self, opened: Opened) -> bytes:
        """The bytes that a repeat must have in common with the first request under a number."""

    @abstractmethod
    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> Checked:
        """Judge a request, and give it with every decision taken.

        Raises:
            InvalidInputError: It is refused. Its number is used all the same.
        """

    async def new_model(self, request: Any, user: User) -> Model:
        """The model that a request without one makes."""
        raise NotImplementedError

    def tokens(self, checked: Checked) -> Mapping[UsageKind, int]:
        """The tokens that a request uses of budgets, by kind; none where it always runs."""
        return {}

    def spends(self, checked: Checked, model: Model) -> dict[str, float]:
        """The most that a request on a model uses of budgets, by `MODEL kind`."""
        return {f"{model.base_model} {kind}": n for kind, n in self.tokens(checked).items()}

    def result_bytes(self, checked: Checked) -> int:
        """About the bytes that the result of a request will take in the journal."""
        return 0

    # ------------------------------------------------------------------------ in the journal

    @abstractmethod
    def pack(self, opened: Opened, checked: Checked) -> bytes: ...

    @abstractmethod
    def unpack(self, body: bytes, model: Model) -> Checked: ...

    # ------------------------------------------------------------------------ when its turn comes

    @abstractmethod
    async def job(self, checked: Checked, run: OperationRun) -> Job | Outcome:
        """The job that the engine runs; the outcome when there is nothing left to compute."""

    async def complete(self, checked: Checked, run: OperationRun, job: Job) -> Job:
        """Complete a job by what is computed first, while those before it still run."""
        return job

    @abstractmethod
    async def conclude(
        self, checked: Checked, run: OperationRun, job: Job, result: Result
    ) -> Conclusion: ...

    def cleanup(self, job: Job, *, ok: bool) -> None:
        """End a request: what its job wrote is listed by now, or goes."""


def canonical(body: Any) -> bytes:
    """JSON whose bytes depend on the content alone.

    Raises:
        InvalidInputError: It is nested deeper than can be written, which is less than can be read.
    """
    try:
        return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as exc:
        raise InvalidInputError("lists and objects are nested too deeply, over 250 levels") from exc


def json_outcome(body: Mapping[str, Any]) -> Outcome:
    return Outcome(kind="json", payload=orjson.dumps(body))
