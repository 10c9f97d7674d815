"""The rows of the store as frozen values.

Times are seconds since the epoch (UTC). A record holds what the database holds and computes
nothing; what a row means on the wire is decided by the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
RowState = Literal["accepted", "done", "failed", "refused"]
UsageKind = Literal[
    "training",
    "sampling_prefill",
    "sampling_prefill_cached",
    "sampling_sample",
    "checkpoint",
    "storage",
    "device_seconds",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    user_id: str
    name: str
    email: str
    created_at: float
    disabled_at: float | None = None
    """Since when an administrator refuses this user; None: not at all."""
    quotas: dict[str, float] = field(default_factory=dict, hash=False)
    """Limits of this user that differ from the server's, by name."""
    key_id: int | None = None
    """The key that calls for this user; None: nobody calls, or nobody's key is needed."""
    key_requests_per_minute: float = 0.0
    """The limit of that key; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    key_id: int
    user_id: str
    name: str
    note: str
    created_at: float
    revoked_at: float | None
    role: str = "user"
    """`user`; `admin`: sees and stops what other users do; `metrics`: reads `/metrics` alone."""
    requests_per_minute: float = 0.0
    """A limit of its own beneath its user's; 0: none."""


BudgetScope = Literal["user", "key", "run"]
BudgetUnit = Literal["tokens", "device_seconds", "money"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingBudget:
    """A limit on what a user, a key or a run may use in all, from when it was set."""

    scope: BudgetScope
    subject: str
    """The id of the user or run, or the number of the key."""
    unit: BudgetUnit
    user_id: str
    """Whose work it limits."""
    amount: float
    pauses: bool
    """At the edge work waits until there is more; else it is refused."""
    by_admin: bool
    """Only administrators change it."""
    set_at: float
    before: dict[str, float]
    """The use before it was set, by `MODEL kind`; it does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    session_id: str
    user_id: str
    created_at: float
    last_heartbeat: float
    tags: list[str]
    user_metadata: dict[str, Any]
    display_name: str | None
    project_id: str | None
    sdk_version: str
    status: dict[str, Any]
    """As on the wire (contract 7.9): `{"type": "active"}`, `{"type": "client_finished", ...}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model is a training run; `model_id` is `<session_id>:train:<model_seq_id>`."""

    model_id: str
    session_id: str
    user_id: str
    model_seq_id: int
    base_model: str
    lora: dict[str, Any]
    """The fields of `engine.jobs.LoraSpec`."""
    optimizer_config: dict[str, Any]
    user_metadata: dict[str, Any] | None
    created_at: float
    last_request_time: float
    corrupted: bool
    unloaded: bool
    base_fingerprint: str | None = None
    """Of the base weights it was made on; None where the engine has none to say."""
    name: str | None = None
    """Given by its user; None: it goes by the name of its session."""
    note: str | None = None
    tags: list[str] | None = None
    """Given by its user; None: it has those of its session."""
    settings: dict[str, Any] | None = None
    """What its program says it was started with: hyperparameters, data, reward."""
    made_from: str | None = None
    """The path of the checkpoint it began as."""
    continues: str | None = None
    """The run that it goes on from: both are segments of one run."""
    continues_step: int | None = None
    """The step of the program at which it goes on; the server's own count is `first_step`."""
    first_step: int | None = None
    """Optimizer steps that the segments before it made; None: it is a run of its own."""
    first_run_id: str | None = None
    """The first segment of a run that has several; None: this one."""
    continued_by: str | None = None
    """The last segment, which stands for the run in lists; None: this one."""

    @property
    def first_segment_id(self) -> str:
        """The id by which all segments of its run are found."""
        return self.first_run_id or self.model_id


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A training request as accepted. Creation (`create_model`, create-via-load) has seq_id 0."""

    model_id: str
    seq_id: int
    kind: str
    request_id: str
    user_id: str
    body: bytes
    """Whatever the server needs to run the request again; opaque to the store."""
    body_hash: bytes = b""
    """What a repeat must have in common with it; empty: of the whole body."""
    accepted_at: float = 0.0
    """0: now."""
    refused: str | None = None
    """The reason, for a request that was refused but consumes its seq_id; it is never replayed."""
    key_id: int | None = None
    """The key it came with, which its tokens are counted for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    model_id: str
    seq_id: int
    kind: str
    request_id: str
    user_id: str
    body: bytes | None
    """None once a snapshot made it useless."""
    body_hash: bytes
    state: RowState
    accepted_at: float
    started_at: float | None
    finished_at: float | None
    result: bytes | None
    """None while running, and again once the result was fetched or its TTL ended."""
    result_type: str | None
    error: str | None
    error_category: str | None
    key_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOutline:
    """A row of the journal without its body and its result, which may be large."""

    model_id: str
    kind: str
    request_id: str
    user_id: str
    body_hash: bytes
    state: RowState
    result_bytes: int | None
    """How long the result is; None where there is none, or none any more."""
    result_type: str | None
    error: str | None
    error_category: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCount:
    """Use to be counted: tokens, or checkpoints, or byte-hours of storage."""

    kind: UsageKind
    count: float
    user_id: str
    session_id: str | None = None
    model_id: str | None = None
    base_model: str | None = None
    project_id: str | None = None
    key_id: int | None = None
    """The key that asked for it; None where no request did."""
    at: float = 0.0
    """0: now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a request of the journal ended: with a result, or with an error."""

    request_id: str
    result: bytes | None = None
    result_type: str | None = None
    error: str | None = None
    error_category: str | None = None
    started_at: float | None = None
    finished_at: float
    usage: tuple[UsageCount, ...] = ()
    """Counted in the same transaction: what is billed is what ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The client has a result: it may be dropped then."""

    request_id: str
    drop_result_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    bucket_start: int
    kind: UsageKind
    count: float
    user_id: str
    session_id: str | None
    model_id: str | None
    base_model: str | None
    project_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSession:
    sampling_session_id: str
    session_id: str
    user_id: str
    seq_id: int
    base_model: str
    model_path: str | None
    folder: str | None
    """The adapter's checkpoint folder; None samples the base model."""
    ephemeral: bool
    """The folder belongs to this sampling session alone and goes with it."""
    created_at: float
    model_id: str | None = None
    """The run that such a folder is of."""
    size_bytes: int = 0
    """Of such a folder; 0 in rows of before, until a server has measured it."""
    inflight: bool = False
    """Samples from the newest weights that its run saved in this manner, not from its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: str
    """`tinker://<model_id>/<kind>/<name>`; the key."""
    model_id: str
    user_id: str
    kind: CheckpointKind
    name: str
    folder: str
    size_bytes: int
    base_model: str
    lora: dict[str, Any]
    optimizer_config: dict[str, Any] = field(default_factory=lambda: {"type": "adamw"})
    has_optimizer: bool = False
    project_id: str | None = None
    public: bool = False
    created_at: float = 0.0
    """0: now."""
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None
    request_id: str | None = None
    """The request that saved it: a replay after a crash finds its own work done."""
    num_steps: int | None = None
    """Optimizer steps of its run when it was saved; None where nobody counted."""

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    loss_id: str
    session_id: str
    user_id: str
    seq_id: int
    name: str
    inputs: list[dict[str, Any]]
    graph: dict[str, Any]
    created_at: float
    size_bytes: int = 0
    """Of its inputs and its graph, in the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A model's state right after op `seq_id`; the journal is replayed from `seq_id + 1`."""

    model_id: str
    seq_id: int
    folder: str
    created_at: float
    size_bytes: int = 0
    """Of its folder; 0 in rows of before, until a server has measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    timestamp: float
    user_id: str
    event: str
    details: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointName:
    """A name of one user's own for a checkpoint."""

    user_id: str
    name: str
    path: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryAnswer:
    """A sampled answer of a recorded conversation; arrays are little-endian bytes."""

    answer_id: int = 0
    """Given by the store."""
    user_id: str
    trajectory_id: str
    parent_id: int | None
    history: bytes
    """Digest of the messages up to and including this answer."""
    prompt_tokens: bytes
    """int32: what followed the parent's tokens, or the whole prompt."""
    tokens: bytes
    """int32, sampled."""
    logprobs: bytes
    """float32, of `tokens`."""
    stop_reason: str
    model: str
    snapshot: str
    """The immutable folder that was sampled from; empty for a base model."""
    created_at: float

    @property
    def num_bytes(self) -> int:
        """The bytes that count as stored: those of the arrays."""
        return len(self.prompt_tokens) + len(self.tokens) + len(self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCurve:
    """A curve of a run; `points` is opaque here."""

    model_id: str
    name: str
    stride: int
    """How many logged values one point stands for."""
    points: bytes
