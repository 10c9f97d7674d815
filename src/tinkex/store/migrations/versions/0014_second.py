"""Runs have names, settings and segments; what is stored has a size; users, keys and runs budgets.

Sizes are counted from then on, so nobody has to measure. Those of folders are not known here: a
server measures what has none when it starts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0010"


def upgrade() -> None:
    _describe_runs()
    _count_sizes()
    _make_budgets()
    # Sampling sessions that follow the newest weights of their run are marked.
    inflight = sa.Column("inflight", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("sampling_sessions", inflight)


def _describe_runs() -> None:
    for name in ("name", "note", "made_from", "continues", "first_run_id", "continued_by"):
        op.add_column("models", sa.Column(name, sa.String))
    for name in ("tags", "settings"):
        op.add_column("models", sa.Column(name, sa.JSON))
    for name in ("continues_step", "first_step"):
        op.add_column("models", sa.Column(name, sa.BigInteger))
    op.add_column("checkpoints", sa.Column("num_steps", sa.BigInteger))
    op.create_index("ix_models_names", "models", ["user_id", "name"])
    op.create_index("ix_models_segments", "models", ["first_run_id"])


def _count_sizes() -> None:
    for table in ("snapshots", "sampling_sessions", "custom_losses"):
        size = sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0")
        op.add_column(table, size)
    op.create_index("ix_custom_losses_owner", "custom_losses", ["user_id"])
    op.execute(
        "UPDATE custom_losses SET size_bytes = "
        "LENGTH(CAST(inputs AS TEXT)) + LENGTH(CAST(graph AS TEXT))"
    )


def _make_budgets() -> None:
    op.create_table(
        "budgets",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("scope", "subject", "unit")),
        sa.Column("user_id", sa.String, nullable=False),
        sa.Column("amount", sa.Double, nullable=False),
        *(sa.Column(name, sa.Boolean, nullable=False) for name in ("pauses", "by_admin")),
        sa.Column("set_at", sa.Double, nullable=False),
        sa.Column("before", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("scope", "subject", "unit", name="pk_budgets"),
    )
