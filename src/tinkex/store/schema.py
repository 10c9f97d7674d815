"""The tables. Every query the server makes per request hits an index that ends it in O(log n).

The table of a record has a column for each of its fields, of the type that the field has; what is
said here is the rest: keys, indexes, and columns that no record shows. Times are doubles (seconds,
UTC), so that SQLite and PostgreSQL agree to the bit. A new database is made from these tables; a
change here or in `records` needs a revision in `migrations/versions` for those that exist already.
A test opens a recorded database and compares.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import SchemaItem

from tinkex.store import records

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

# SQLite numbers rows by itself only under the type name INTEGER.
BigId = BigInteger().with_variant(sqlite.INTEGER(), "sqlite")
_TYPES: dict[Any, Any] = {
    str: String,
    int: BigInteger,
    float: Double,
    bool: Boolean,
    bytes: LargeBinary,
    list: JSON,
    dict: JSON,
}


def _table(name: str, record: type, *items: SchemaItem, key: tuple[str, ...] = ()) -> Table:
    """The table of a record; a column among `items` is said there, whatever the field is."""
    said = {item.name for item in items if isinstance(item, Column)}
    hints = {field: hint for field, hint in get_type_hints(record).items() if field not in said}
    columns = [_column(field, hint, is_key=field in key) for field, hint in hints.items()]
    return Table(name, metadata, *columns, *items)


def _column(name: str, hint: Any, *, is_key: bool) -> Column[Any]:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = get_origin(kinds[0]) or kinds[0]  # dict of dict[str, Any]
    column_type = _TYPES.get(kind, String)  # a Literal is one of some words
    return Column(name, column_type, primary_key=is_key, nullable=type(None) in kinds)


def _size_bytes() -> Column[int]:
    """The size of what a row stands for; rows of before the column have 0."""
    return Column("size_bytes", BigInteger, nullable=False, server_default="0")


users = Table(
    "users",
    metadata,
    Column("user_id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("email", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("disabled_at", Double),
    # Limits of this user that differ from the server's, by name.
    Column("quotas", JSON),
)

api_keys = _table(
    "api_keys",
    records.ApiKey,
    Column("key_id", Integer, primary_key=True, autoincrement=True),
    Column("key_hash", String, nullable=False, unique=True),
    Column("role", String, nullable=False, server_default="user"),
    Column("requests_per_minute", Double, nullable=False, server_default="0"),
)

sessions = _table(
    "sessions",
    records.Session,
    Column("status_type", String, nullable=False),
    Index("ix_sessions_owner", "user_id", "created_at", "session_id"),
    Index("ix_sessions_created", "created_at", "session_id"),
    Index("ix_sessions_status", "status_type", "last_heartbeat"),
    key=("session_id",),
)

models = _table(
    "models",
    records.Model,
    Column("session_id", String, nullable=False, index=True),
    Column("model_seq_id", Integer, nullable=False),
    Index("ix_models_owner", "user_id", "created_at"),
    Index("ix_models_created", "created_at", "model_id"),
    Index("ix_models_bases", "user_id", "base_model"),
    Index("ix_models_names", "user_id", "name"),
    Index("ix_models_segments", "first_run_id"),
    key=("model_id",),
)

journal = _table(
    "journal",
    records.JournalRow,
    Column("request_id", String, nullable=False, unique=True),
    Column("error", Text),
    # When the result may be dropped: set at the end of the op, moved closer by its retrieval.
    Column("drop_result_at", Double),
    # The key it came with; unknown on open servers and in rows of before.
    Column("key_id", Integer),
    Index("ix_journal_drop", "drop_result_at"),
    Index("ix_journal_finished", "finished_at"),
    key=("model_id", "seq_id"),
)

snapshots = _table("snapshots", records.Snapshot, _size_bytes(), key=("model_id",))

sampling_sessions = _table(
    "sampling_sessions",
    records.SamplingSession,
    Column("num_clients", BigInteger, nullable=False),
    _size_bytes(),
    UniqueConstraint("session_id", "seq_id"),
    Index("ix_sampling_sessions_model", "model_id"),
    key=("sampling_session_id",),
)

checkpoints = _table(
    "checkpoints",
    records.Checkpoint,
    Index("ix_checkpoints_run", "model_id", "created_at"),
    Index("ix_checkpoints_owner", "user_id", "created_at"),
    Index("ix_checkpoints_expiry", "expires_at"),
    key=("path",),
)

custom_losses = _table(
    "custom_losses",
    records.CustomLoss,
    _size_bytes(),
    UniqueConstraint("session_id", "seq_id"),
    Index("ix_custom_losses_owner", "user_id"),
    key=("loss_id",),
)

budgets = _table("budgets", records.SpendingBudget, key=("scope", "subject", "unit"))

# Empty text, or key 0, stands for "not known": NULLs never conflict, so they cannot be part of a
# primary key.
usage = Table(
    "usage",
    metadata,
    Column("bucket_start", BigInteger, primary_key=True),
    Column("user_id", String, primary_key=True),
    Column("session_id", String, primary_key=True),
    Column("model_id", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("base_model", String, primary_key=True),
    Column("project_id", String, primary_key=True),
    Column("key_id", Integer, primary_key=True, autoincrement=False),
    Column("count", Double, nullable=False),
)

audit = _table(
    "audit",
    records.AuditEntry,
    Column("entry_id", BigId, primary_key=True, autoincrement=True),
    Index("ix_audit_owner", "user_id", "timestamp"),
    Index("ix_audit_time", "timestamp"),
)

# Facts about the database itself, such as the id it shares with its data folder.
meta = Table(
    "meta",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", Text, nullable=False),
)

# Folders whose row is gone and that still lie on disk; nothing else is ever removed there.
deleted_folders = Table(
    "deleted_folders",
    metadata,
    Column("folder", String, primary_key=True),
    Column("deleted_at", Double, nullable=False),
)

checkpoint_names = _table("checkpoint_names", records.CheckpointName, key=("user_id", "name"))

# One row an answer: the tokens since its parent's, and those that were sampled. A conversation is
# read by going up from a leaf, so a long one is not stored again with every turn.
trajectory_answers = _table(
    "trajectory_answers",
    records.TrajectoryAnswer,
    Column("answer_id", BigId, primary_key=True, autoincrement=True),
    Index("ix_trajectory_answers_owner", "user_id", "trajectory_id", "answer_id"),
    Index("ix_trajectory_answers_age", "created_at"),
)

# One row a curve: its points as packed numbers, thinned so that a long run costs no more.
curves = _table(
    "curves",
    records.StoredCurve,
    Column("stride", Integer, nullable=False),
    Column("updated_at", Double, nullable=False),
    key=("model_id", "name"),
)

secrets = Table(
    "secrets",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("user_id", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("value", Text, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
)
