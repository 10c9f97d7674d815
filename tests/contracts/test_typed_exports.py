"""Type checkers and editors see every public name that a program can touch."""

from __future__ import annotations

import ast
from pathlib import Path

import tinkex


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse(Path(tinkex.__file__).read_text("utf-8"))
    guarded = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    seen = {
        alias.asname: node.module if alias.name == alias.asname else f"{node.module}.{alias.name}"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(seen) == {*tinkex._EXPORTS, *tinkex._SUBMODULES}
    assert {name: seen[name] for name in tinkex._EXPORTS} == tinkex._EXPORTS
