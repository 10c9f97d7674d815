"""Short names of checkpoints; the exact tokens of conversations."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "checkpoint_names",
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "name", name=op.f("pk_checkpoint_names")),
    )
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "trajectory_answers",
        sa.Column("answer_id", number, autoincrement=True, nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("parent_id", sa.BigInteger()),
        sa.Column("history", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_tokens", sa.LargeBinary(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("stop_reason", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("snapshot", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("answer_id", name=op.f("pk_trajectory_answers")),
    )
    for name, columns in _INDEXES.items():
        op.create_index(name, "trajectory_answers", columns)


_INDEXES = {
    "ix_trajectory_answers_owner": ["user_id", "trajectory_id", "answer_id"],
    "ix_trajectory_answers_age": ["created_at"],
}
