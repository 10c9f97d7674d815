"""A run remembers the fingerprint of the base weights it was made on."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("models", sa.Column("base_fingerprint", sa.String(), nullable=True))
