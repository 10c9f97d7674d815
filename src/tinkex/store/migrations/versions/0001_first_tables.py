"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("key_hash", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("note", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
    )
    op.create_table(
        "audit",
        sa.Column(
            "entry_id",
            sa.BigInteger().with_variant(sa.INTEGER(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("timestamp", sa.Double(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_owner", "audit", ["user_id", "timestamp"])
    op.create_table(
        "checkpoints",
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("optimizer_config", sa.JSON(), nullable=False),
        sa.Column("has_optimizer", sa.Boolean(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("request_id", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("path", name=op.f("pk_checkpoints")),
    )
    op.create_index("ix_checkpoints_expiry", "checkpoints", ["expires_at"])
    op.create_index("ix_checkpoints_owner", "checkpoints", ["user_id", "created_at"])
    op.create_index("ix_checkpoints_run", "checkpoints", ["model_id", "created_at"])
    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("inputs", sa.JSON(), nullable=False),
        sa.Column("graph", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("loss_id", name=op.f("pk_custom_losses")),
        sa.UniqueConstraint("session_id", "seq_id", name=op.f("uq_custom_losses_session_id")),
    )
    op.create_table(
        "idempotency",
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"])
    op.create_table(
        "journal",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("body_hash", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("result_type", sa.String(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("error_category", sa.String(), nullable=True),
        sa.Column("drop_result_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("model_id", "seq_id", name=op.f("pk_journal")),
        sa.UniqueConstraint("request_id", name=op.f("uq_journal_request_id")),
    )
    op.create_index("ix_journal_drop", "journal", ["drop_result_at"])
    op.create_index("ix_journal_finished", "journal", ["finished_at"])
    op.create_table(
        "models",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("model_seq_id", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("optimizer_config", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_request_time", sa.Double(), nullable=False),
        sa.Column("corrupted", sa.Boolean(), nullable=False),
        sa.Column("unloaded", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_models")),
    )
    op.create_index("ix_models_owner", "models", ["user_id", "created_at"])
    op.create_index("ix_models_session_id", "models", ["session_id"])
    op.create_table(
        "sampling_sessions",
        sa.Column("sampling_session_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("folder", sa.String(), nullable=True),
        sa.Column("ephemeral", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("num_clients", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sampling_session_id", name=op.f("pk_sampling_sessions")),
        sa.UniqueConstraint("session_id", "seq_id", name=op.f("uq_sampling_sessions_session_id")),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_secrets")),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_heartbeat", sa.Double(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("display_name", sa.String(), nullable=True),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("sdk_version", sa.String(), nullable=False),
        sa.Column("status", sa.JSON(), nullable=False),
        sa.Column("status_type", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
    )
    op.create_index("ix_sessions_created", "sessions", ["created_at", "session_id"])
    op.create_index("ix_sessions_owner", "sessions", ["user_id", "created_at", "session_id"])
    op.create_index("ix_sessions_status", "sessions", ["status_type", "last_heartbeat"])
    op.create_table(
        "snapshots",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_snapshots")),
    )
    op.create_table(
        "usage",
        sa.Column("bucket_start", sa.BigInteger(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("count", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint(
            "bucket_start",
            "user_id",
            "session_id",
            "model_id",
            "kind",
            "base_model",
            "project_id",
            name=op.f("pk_usage"),
        ),
    )
    op.create_table(
        "users",
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("email", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_users")),
    )
