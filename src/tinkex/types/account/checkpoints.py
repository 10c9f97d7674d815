"""Checkpoints and the training runs that made them, as a server lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self, TypeAlias, cast

from tinkex.errors import InvalidInputError
from tinkex.types.fields.bounds import TtlSeconds
from tinkex.types.fields.message import Listing, Metrics, Request, Response, Texts
from tinkex.types.fields.value import short

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]
CheckpointKind: TypeAlias = Literal["weights", "sampler_weights", "external_weights"]

TYPE_BY_KIND: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_PREFIX = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+@:~-]{0,199}")


def is_tinker_path(text: str) -> bool:
    """Whether a text means a checkpoint rather than a base model, a run or a file."""
    return text.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """The parts of `tinker://RUN_ID/KIND/NAME`."""

    run_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(
        cls, text: Any, *, kinds: Sequence[str] = tuple(TYPE_BY_KIND), path: str = ""
    ) -> TinkerPath:
        """Read a checkpoint's path; `path` is the field that an error names.

        Raises:
            InvalidInputError: It is none, or of another kind.
        """
        is_path = isinstance(text, str) and is_tinker_path(text)
        parts = text.removeprefix(_PREFIX).split("/") if is_path else []
        if len(parts) != 3 or not all(parts) or parts[1] not in kinds:
            raise InvalidInputError(
                f"expected {_PREFIX}RUN_ID/{'|'.join(kinds)}/NAME, got {text!r}", path=path
            )
        return cls(parts[0], cast(CheckpointKind, parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{_PREFIX}{self.run_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"


def check_name(name: Any, *, path: str = "path") -> str:
    """Refuse names that are empty, too long, or could be mistaken for a path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"checkpoint name {short(name)} is not allowed. Use 1 to 200 letters, digits and any "
            "of _ . , = + @ : ~ -, starting with a letter, digit or underscore.",
            path=path,
        )
    return name


class Checkpoint(Response):
    """A saved checkpoint; `checkpoint_id` is `weights/NAME`, `sampler_weights/NAME`, ..."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: Texts | None = None
    expires_at: datetime | None = None
    base_model: str | None = None
    """The base model that it was trained on. Sent since SDK 0.39."""


class ParsedCheckpointTinkerPath(Response):
    """The parts of `tinker://RUN/KIND/NAME`."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Split a checkpoint path into its parts.

        Raises:
            InvalidInputError: It is not `tinker://RUN/weights|sampler_weights|external_weights/NAME`.
        """
        parsed = TinkerPath.parse(tinker_path, path="tinker_path")
        return cls(
            tinker_path=tinker_path,
            training_run_id=parsed.run_id,
            checkpoint_type=TYPE_BY_KIND[parsed.kind],
            checkpoint_id=parsed.checkpoint_id,
        )


class Cursor(Response):
    """Where a page lies in the whole list."""

    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(Response):
    """A page of checkpoints; without a cursor, all of them."""

    checkpoints: Listing[Checkpoint]
    cursor: Cursor | None = None


class CheckpointArchiveUrlResponse(Response):
    """A signed address of a whole checkpoint as one archive (SDKs before 0.25)."""

    url: str
    expires: datetime


class SetCheckpointTtlRequest(Request):
    """Seconds until the checkpoint is deleted; None, sent as null, keeps it for good."""

    ttl_seconds: TtlSeconds | None


class RunWorker(Response):
    """A worker that has a run in memory; what it holds and does is for all runs together."""

    name: str
    utilisation: float
    """The share of the last minute that it was busy, between 0 and 1."""
    kv_bytes: int
    """Keys and values of samples."""
    adapter_bytes: int
    """Adapters in training, with gradients and optimizer state."""


class RunReference(Response):
    """A moment of a run: after so many steps, as the program that trains it counts them."""

    run_id: str
    step: int


class RunSegment(Response):
    """A part of a run that was resumed: the model that trained it, from a step on."""

    run_id: str
    step: int
    time: datetime


class TrainingRun(Response):
    """A model that was or is being trained. `corrupted` means that it can no longer be used."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: Texts | None = None
    name: str | None = None
    """Its name, or that of its session. This and all further fields only Tinkex servers send."""
    note: str | None = None
    tags: list[str] | None = None
    """Its tags, or those of its session."""
    project_id: str | None = None
    made_from: str | None = None
    """The path of the checkpoint that it began as."""
    continues: RunReference | None = None
    """Where it goes on from, when it is a later segment of a run that was resumed."""
    continued_by: str | None = None
    """The id of the segment that goes on from this one, the last where there are several."""
    state: str | None = None
    """`running`, `waiting`, `idle`, `finished`, `stopped`, `failed` or `lost`."""
    num_steps: int | None = None
    """Steps as its recipe counts them; of a program of one's own, optimizer steps."""
    loss: float | None = None
    """Loss per token of the last step."""
    reward: float | None = None
    """The last value that the program logged under this name; for RL it says more than the loss."""
    kl: float | None = None
    """The last value logged under this name; for distillation it says more than the loss."""
    step_seconds: Metrics | None = None
    """Where the time of a step went, on average over the last 32: `compute`, `wait`, `reduce`
    (adding the gradients of several workers) and `transfer` (bringing them together)."""
    workers: Listing[RunWorker] | None = None
    """The workers that have the run in memory."""
    settings: dict[str, Any] | None = None
    """What its program was started with, as it says with `log_settings`."""
    segments: Listing[RunSegment] | None = None
    """The parts of a run that was resumed, in their order. This, `settings`, `workers` and
    `step_seconds` are sent when one run is asked for, not in lists."""


class TrainingRunsResponse(Response):
    """A page of training runs."""

    training_runs: Listing[TrainingRun]
    cursor: Cursor


class CheckpointName(Response):
    """A short name that a user gave to a checkpoint."""

    name: str
    path: str


class CheckpointNamesResponse(Response):
    """The short names of a user."""

    names: Listing[CheckpointName]
