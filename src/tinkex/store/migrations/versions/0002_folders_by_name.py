"""Folders are named relative to the data folder; what was deleted is written down; an id."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

# What a folder's path ends in, by the part that opens it. Names never hold a separator.
_NUM_PARTS = {"checkpoints": 4, "ephemeral": 2, "state": 3}


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_meta")),
    )
    op.create_table(
        "deleted_folders",
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("folder", name=op.f("pk_deleted_folders")),
    )
    for table in ("checkpoints", "sampling_sessions", "snapshots"):
        _rename(sa.table(table, sa.column("folder", sa.String())))


def _rename(table: sa.TableClause) -> None:
    connection = op.get_bind()
    query = sa.select(table.c.folder).distinct().where(table.c.folder.is_not(None))
    for before in connection.execute(query).scalars().all():
        if (name := relative_name(before)) != before:
            change = sa.update(table).where(table.c.folder == before).values(folder=name)
            connection.execute(change)


def relative_name(folder: str) -> str:
    """The last parts of a path, from the part that opens a folder of ours; else as it was."""
    parts = folder.replace("\\", "/").split("/")
    for opening, num_parts in _NUM_PARTS.items():
        if len(parts) >= num_parts and parts[-num_parts] == opening:
            return "/".join(parts[-num_parts:])
    return folder
