"""Unnamed weights to sample from say which run they are of."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("sampling_sessions", sa.Column("model_id", sa.String(), nullable=True))
    op.create_index("ix_sampling_sessions_model", "sampling_sessions", ["model_id"])
