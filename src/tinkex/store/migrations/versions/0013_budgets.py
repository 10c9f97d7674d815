"""Budgets of users, keys and runs have a table."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
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
