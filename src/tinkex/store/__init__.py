"""What survives a crash: accounts, sessions, runs, the journal, checkpoints and usage."""

from tinkex.store.journal import SeqConflictError
from tinkex.store.models import FilteredRuns, RunFilter
from tinkex.store.records import (
    ApiKey,
    Appended,
    AuditEntry,
    Checkpoint,
    CheckpointKind,
    CheckpointName,
    CustomLoss,
    Ended,
    Fetched,
    JournalRow,
    Model,
    NewRow,
    RowState,
    SamplingSession,
    Session,
    Snapshot,
    StoredCurve,
    TrajectoryAnswer,
    UsageCount,
    UsageKind,
    UsageRow,
    User,
)
from tinkex.store.sample_ledger import SampleLedger
from tinkex.store.sessions import SessionQuery
from tinkex.store.store import Store
from tinkex.store.usage import Used, UsedBy
from tinkex.store.writer import StoreClosedError

__all__ = [
    "ApiKey",
    "Appended",
    "AuditEntry",
    "Checkpoint",
    "CheckpointKind",
    "CheckpointName",
    "CustomLoss",
    "Ended",
    "Fetched",
    "FilteredRuns",
    "Model",
    "NewRow",
    "JournalRow",
    "RowState",
    "RunFilter",
    "SampleLedger",
    "SamplingSession",
    "SeqConflictError",
    "Session",
    "SessionQuery",
    "Snapshot",
    "Store",
    "StoreClosedError",
    "StoredCurve",
    "TrajectoryAnswer",
    "UsageCount",
    "UsageKind",
    "UsageRow",
    "Used",
    "UsedBy",
    "User",
]
