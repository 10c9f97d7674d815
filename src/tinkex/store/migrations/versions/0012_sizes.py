"""Sizes of snapshots, unnamed sampler weights and traced losses, which nobody has to measure then.

Those of folders are not known here: a server measures what has none when it starts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    for table in ("snapshots", "sampling_sessions", "custom_losses"):
        size = sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0")
        op.add_column(table, size)
    op.create_index("ix_custom_losses_owner", "custom_losses", ["user_id"])
    op.execute(
        "UPDATE custom_losses SET size_bytes = "
        "LENGTH(CAST(inputs AS TEXT)) + LENGTH(CAST(graph AS TEXT))"
    )
