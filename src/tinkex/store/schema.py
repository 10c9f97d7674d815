"""The tables. Every query the server makes per request hits an index that ends it in O(log n).

Times are doubles (seconds, UTC), so that SQLite and PostgreSQL agree to the bit. A change here
needs a migration in `migrations/versions`; a test compares the two.
"""

from __future__ import annotations

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

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

# SQLite numbers rows by itself only under the type name INTEGER.
BigId = BigInteger().with_variant(sqlite.INTEGER(), "sqlite")

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

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Integer, primary_key=True, autoincrement=True),
    Column("key_hash", String, nullable=False, unique=True),
    Column("user_id", String, nullable=False),
    Column("name", String, nullable=False),
    Column("note", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("role", String, nullable=False, server_default="user"),
    # Its own, beneath its user's; 0: none.
    Column("requests_per_minute", Double, nullable=False, server_default="0"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("user_id", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_heartbeat", Double, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("display_name", String),
    Column("project_id", String),
    Column("sdk_version", String, nullable=False),
    Column("status", JSON, nullable=False),
    Column("status_type", String, nullable=False),
    Index("ix_sessions_owner", "user_id", "created_at", "session_id"),
    Index("ix_sessions_created", "created_at", "session_id"),
    Index("ix_sessions_status", "status_type", "last_heartbeat"),
)

models = Table(
    "models",
    metadata,
    Column("model_id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("user_id", String, nullable=False),
    Column("model_seq_id", Integer, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("optimizer_config", JSON, nullable=False),
    Column("user_metadata", JSON),
    Column("created_at", Double, nullable=False),
    Column("last_request_time", Double, nullable=False),
    Column("corrupted", Boolean, nullable=False),
    Column("unloaded", Boolean, nullable=False),
    Column("base_fingerprint", String),
    Index("ix_models_owner", "user_id", "created_at"),
    Index("ix_models_created", "created_at", "model_id"),
    Index("ix_models_bases", "user_id", "base_model"),
)

journal = Table(
    "journal",
    metadata,
    Column("model_id", String, primary_key=True),
    Column("seq_id", BigInteger, primary_key=True),
    Column("kind", String, nullable=False),
    Column("request_id", String, nullable=False, unique=True),
    Column("user_id", String, nullable=False),
    Column("body", LargeBinary),
    Column("body_hash", LargeBinary, nullable=False),
    Column("state", String, nullable=False),
    Column("accepted_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("result", LargeBinary),
    Column("result_type", String),
    Column("error", Text),
    Column("error_category", String),
    # When the result may be dropped: set at the end of the op, moved closer by its retrieval.
    Column("drop_result_at", Double),
    # The key it came with; unknown on open servers and in rows of before.
    Column("key_id", Integer),
    Index("ix_journal_drop", "drop_result_at"),
    Index("ix_journal_finished", "finished_at"),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("model_id", String, primary_key=True),
    Column("seq_id", BigInteger, nullable=False),
    Column("folder", String, nullable=False),
    Column("created_at", Double, nullable=False),
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    Column("sampling_session_id", String, primary_key=True),
    Column("session_id", String, nullable=False),
    Column("user_id", String, nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("base_model", String, nullable=False),
    Column("model_path", String),
    Column("folder", String),
    Column("ephemeral", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("num_clients", BigInteger, nullable=False),
    # The run that unnamed weights are of.
    Column("model_id", String),
    UniqueConstraint("session_id", "seq_id"),
    Index("ix_sampling_sessions_model", "model_id"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("path", String, primary_key=True),
    Column("model_id", String, nullable=False),
    Column("user_id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("name", String, nullable=False),
    Column("folder", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("optimizer_config", JSON, nullable=False),
    Column("has_optimizer", Boolean, nullable=False),
    Column("project_id", String),
    Column("public", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("user_metadata", JSON),
    Column("request_id", String),
    Index("ix_checkpoints_run", "model_id", "created_at"),
    Index("ix_checkpoints_owner", "user_id", "created_at"),
    Index("ix_checkpoints_expiry", "expires_at"),
)

custom_losses = Table(
    "custom_losses",
    metadata,
    Column("loss_id", String, primary_key=True),
    Column("session_id", String, nullable=False),
    Column("user_id", String, nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("name", String, nullable=False),
    Column("inputs", JSON, nullable=False),
    Column("graph", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("session_id", "seq_id"),
)

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

audit = Table(
    "audit",
    metadata,
    Column("entry_id", BigId, primary_key=True, autoincrement=True),
    Column("user_id", String, nullable=False),
    Column("timestamp", Double, nullable=False),
    Column("event", String, nullable=False),
    Column("details", JSON, nullable=False),
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

# Short names that a user gave to checkpoints.
checkpoint_names = Table(
    "checkpoint_names",
    metadata,
    Column("user_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("path", String, nullable=False),
    Column("created_at", Double, nullable=False),
)

# One row an answer: the tokens since its parent's, and those that were sampled. A conversation is
# read by going up from a leaf, so a long one is not stored again with every turn.
trajectory_answers = Table(
    "trajectory_answers",
    metadata,
    Column("answer_id", BigId, primary_key=True, autoincrement=True),
    Column("user_id", String, nullable=False),
    Column("trajectory_id", String, nullable=False),
    Column("parent_id", BigInteger),
    Column("history", LargeBinary, nullable=False),
    Column("prompt_tokens", LargeBinary, nullable=False),
    Column("tokens", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("stop_reason", String, nullable=False),
    Column("model", String, nullable=False),
    Column("snapshot", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Index("ix_trajectory_answers_owner", "user_id", "trajectory_id", "answer_id"),
    Index("ix_trajectory_answers_age", "created_at"),
)

# One row a curve: its points as packed numbers, thinned so that a long run costs no more.
curves = Table(
    "curves",
    metadata,
    Column("model_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("stride", Integer, nullable=False),
    Column("points", LargeBinary, nullable=False),
    Column("updated_at", Double, nullable=False),
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
