"""The ledger counts by key as well, and a request in the journal says which key it came with.

Two indexes let the console list the runs of everybody without reading them all.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
_NAMES = ("bucket_start", "user_id", "session_id", "model_id", "kind", "base_model", "project_id")


def upgrade() -> None:
    op.add_column("journal", sa.Column("key_id", sa.Integer(), nullable=True))
    _add_key_to_usage()
    op.create_index("ix_models_created", "models", ["created_at", "model_id"])
    op.create_index("ix_models_bases", "models", ["user_id", "base_model"])


def _add_key_to_usage() -> None:
    """A new table with the old rows: SQLite cannot change the primary key of an old one."""
    names = (*_NAMES, "key_id")
    kinds = {"bucket_start": sa.BigInteger(), "key_id": sa.Integer()}
    op.create_table(
        "usage_new",
        *(sa.Column(name, kinds.get(name, sa.String()), nullable=False) for name in names),
        sa.Column("count", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint(*names, name=op.f("pk_usage_new")),
    )
    kept = ", ".join(_NAMES)
    op.execute(f"INSERT INTO usage_new ({kept}, key_id, count) SELECT {kept}, 0, count FROM usage")
    op.drop_table("usage")
    op.rename_table("usage_new", "usage")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER INDEX pk_usage_new RENAME TO pk_usage")
