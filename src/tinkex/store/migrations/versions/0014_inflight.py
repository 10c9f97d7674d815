"""Sampling sessions that follow the newest weights of their run are marked."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    column = sa.Column("inflight", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("sampling_sessions", column)
