"""Admin keys, disabled users and quotas of one user."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("users", sa.Column("disabled_at", sa.Double(), nullable=True))
    op.add_column("users", sa.Column("quotas", sa.JSON(), nullable=True))
    is_admin: sa.Column[bool] = sa.Column(
        "is_admin", sa.Boolean(), nullable=False, server_default=sa.false()
    )
    op.add_column("api_keys", is_admin)
    op.create_index("ix_audit_time", "audit", ["timestamp"])
