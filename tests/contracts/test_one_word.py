"""One word for one thing: public classes of one name are the same thing, seen by two packages."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "tinkex"
SAME_THING = {
    "AdamParams": "the optimizer as it is declared, and as a user writes it",
    "Checkpoint": "a row of the store, and what the API answers of it",
    "CheckpointName": "a row of the store, and what the API answers of it",
    "FinishedSample": "as the server tells of it, and as the client reads it",
    "LionParams": "the optimizer as it is declared, and as a user writes it",
    "MuonParams": "the optimizer as it is declared, and as a user writes it",
    "Session": "a row of the store, and the client's side of it",
    "TrajectoryAnswer": "a row of the store, and what the API answers of it",
}


def test_classes_of_one_name_are_one_thing() -> None:
    homes = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(SOURCE).as_posix())
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: shared[name] for name in shared if name not in SAME_THING} == {}
    assert [name for name in SAME_THING if name not in shared] == [], "no longer shared"
