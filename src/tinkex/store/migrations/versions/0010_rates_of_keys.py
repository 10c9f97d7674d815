"""A key may have a rate of its own, beneath its user's."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    kind: sa.Double[float] = sa.Double()
    op.add_column(
        "api_keys", sa.Column("requests_per_minute", kind, nullable=False, server_default="0")
    )
