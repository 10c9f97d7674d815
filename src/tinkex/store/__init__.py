"""What survives a crash: accounts, sessions, runs, the journal, checkpoints and usage."""

from tinkex.store.checkpoints import CheckpointQuery
from tinkex.store.journal import SeqConflictError
from tinkex.store.models import RunFilter
from tinkex.store.records import (
    ApiKey,
    AuditEntry,
    BudgetScope,
    BudgetUnit,
    Checkpoint,
    CheckpointKind,
    CustomLoss,
    Ended,
    Fetched,
    JournalOutline,
    JournalRow,
    Model,
    NewRow,
    SamplingSession,
    Session,
    Snapshot,
    SpendingBudget,
    StoredCurve,
    TrajectoryAnswer,
    UsageCount,
    UsageKind,
    UsageRow,
    User,
)
from tinkex.store.runs import DeletedRun, WholeRun
from tinkex.store.sample_ledger import SampleLedger
from tinkex.store.sessions import SessionQuery
from tinkex.store.store import Store
from tinkex.store.usage import UsedBy
from tinkex.store.writer import StoreClosedError

__all__ = [
    "ApiKey",
    "AuditEntry",
    "SpendingBudget",
    "BudgetScope",
    "BudgetUnit",
    "Checkpoint",
    "CheckpointKind",
    "CheckpointQuery",
    "CustomLoss",
    "DeletedRun",
    "Ended",
    "Fetched",
    "Model",
    "NewRow",
    "JournalOutline",
    "JournalRow",
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
    "UsedBy",
    "User",
    "WholeRun",
]
