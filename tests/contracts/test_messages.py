"""Each message is declared once; `test_costs.py` holds each of its fields to a bound."""

from __future__ import annotations

from typing import get_args

from tinkex.cli.commands.checkpoint_delete import _TYPES
from tinkex.store.records import CheckpointKind
from tinkex.types.account.checkpoints import TYPE_BY_KIND
from tinkex.types.fields.bounds import MAX_ID
from tinkex.types.training.forward_backward import MAX_MODEL_ID
from tinkex.wire.endpoints import ENDPOINTS


def test_paths_and_names_are_unique() -> None:
    assert len({(row.method, row.path) for row in ENDPOINTS.values()}) == len(ENDPOINTS)


def test_what_cannot_read_a_declaration_says_the_same():
    """The store imports nothing of ours, arrays and the command line do without pydantic."""
    assert get_args(CheckpointKind) == tuple(TYPE_BY_KIND)
    assert _TYPES == TYPE_BY_KIND | {kind: kind for kind in TYPE_BY_KIND.values()}
    assert MAX_MODEL_ID == MAX_ID
