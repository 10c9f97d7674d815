"""A server that lost its claim must not write any more, even when it has not noticed.

The lock of PostgreSQL ends with its connection, and a second server may take it while the first one
still runs. So each claim raises an epoch in the database, and every transaction of the writer first
looks whether the epoch is still its own; on PostgreSQL the row stays shared until the commit, so no
claim comes in between. A writer without a claim (`tinkex keys`) has no fence.
"""

from __future__ import annotations

from sqlalchemy import Connection, Engine, select, update

from tinkex.errors import TinkerError
from tinkex.store import schema
from tinkex.store.upsert import insert_or_ignore

_NAME = "epoch"
_row = schema.meta.c.name == _NAME


class FencedError(TinkerError, RuntimeError):
    """Another server took over this database; nothing of this one is written any more."""

    code = "fenced"


class Fence:
    def __init__(self, engine: Engine) -> None:
        """Raise the epoch: every fence before this one is down."""
        with engine.begin() as connection:
            connection.execute(insert_or_ignore(connection, schema.meta), _first())
            query = select(schema.meta.c.value).where(_row).with_for_update()
            self.epoch = int(connection.execute(query).scalar_one()) + 1
            raised = update(schema.meta).where(_row).values(value=str(self.epoch))
            connection.execute(raised)

    def check(self, connection: Connection) -> None:
        """To be called first in a transaction.

        Raises:
            FencedError: The epoch is another's.
        """
        query = select(schema.meta.c.value).where(_row).with_for_update(read=True)
        found = connection.execute(query).scalar()
        if found != str(self.epoch):
            raise FencedError(
                f"Another server took over this database (epoch {found}, this one has "
                f"{self.epoch}). This one stops; what it accepted is the other's now."
            )


def _first() -> dict[str, str]:
    return {"name": _NAME, "value": "0"}
