"""A key has a role: an ordinary user's, an administrator's, or one that only reads `/metrics`."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
_keys = sa.table("api_keys", sa.column("role", sa.String), sa.column("is_admin", sa.Boolean))


def upgrade() -> None:
    role: sa.Column[str] = sa.Column("role", sa.String(), nullable=False, server_default="user")
    op.add_column("api_keys", role)
    op.execute(_keys.update().where(_keys.c.is_admin).values(role="admin"))
    with op.batch_alter_table("api_keys") as keys:
        keys.drop_column("is_admin")
