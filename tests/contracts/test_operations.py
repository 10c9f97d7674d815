"""An operation is a row in `wire.endpoints` and a class in `server/operations`: two files."""

from __future__ import annotations

import re
from pathlib import Path

import tinkex
from tinkex.server.operations.table import OPERATIONS
from tinkex.wire.endpoints import ENDPOINTS

SERVER = Path(tinkex.__file__).parent / "server"


def test_every_ordered_endpoint_is_an_operation():
    ordered = {name for name, row in ENDPOINTS.items() if row.is_ordered}
    assert ordered <= set(OPERATIONS)
    assert set(OPERATIONS) - ordered == {"create_model"}, "which begins the order"


def test_a_row_alone_says_what_order_and_recovery_must_know():
    for operation in OPERATIONS.values():
        assert not {"changes_state", "is_barrier", "path"} & set(vars(operation))


def test_no_other_module_of_the_server_knows_an_operation_by_name():
    """What a table or an if-chain of names would be, is asked of the object."""
    names = "|".join(sorted(OPERATIONS, key=len, reverse=True))
    quoted = re.compile(rf"""["']({names})["']""")
    others = [path for path in SERVER.rglob("*.py") if path.parent.name != "operations"]
    # Which calls cost disk and models is the quotas' own table; the console reads a progress text.
    others = [path for path in others if path.name not in ("quotas.py", "views.py")]
    found = [
        f"{path.name}: {match.group()}"
        for path in others
        for match in quoted.finditer(path.read_text())
    ]
    assert not found
