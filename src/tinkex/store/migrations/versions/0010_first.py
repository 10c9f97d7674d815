"""The revision that every database begins with: the tables of `schema`, made from there.

The next revision names this one as its `down_revision` and changes databases that exist already.
"""

revision = "0010"
down_revision = None


def upgrade() -> None:
    """Nothing to do: `database.migrate` made the tables, or refused the database."""
