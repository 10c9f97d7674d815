"""What a run is called, what its program was started with, and which run it goes on from."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    for name in ("name", "note", "made_from", "continues", "first_run_id", "continued_by"):
        op.add_column("models", sa.Column(name, sa.String))
    for name in ("tags", "settings"):
        op.add_column("models", sa.Column(name, sa.JSON))
    for name in ("continues_step", "first_step"):
        op.add_column("models", sa.Column(name, sa.BigInteger))
    op.add_column("checkpoints", sa.Column("num_steps", sa.BigInteger))
    op.create_index("ix_models_names", "models", ["user_id", "name"])
    op.create_index("ix_models_segments", "models", ["first_run_id"])
