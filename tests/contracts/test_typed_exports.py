"""Type checkers and editors see every public name that a program can touch."""

from __future__ import annotations

import ast
from pathlib import Path

import tinkex
from tinkex import types


def for_type_checkers(file: str | None) -> list[ast.ImportFrom]:
    """The imports of a module that only type checkers follow."""
    assert file is not None
    guarded = next(
        node
        for node in ast.parse(Path(file).read_text("utf-8")).body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    return [node for node in guarded.body if isinstance(node, ast.ImportFrom)]


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    seen = {
        alias.asname: node.module if alias.name == alias.asname else f"{node.module}.{alias.name}"
        for node in for_type_checkers(tinkex.__file__)
        for alias in node.names
    }
    assert set(seen) == {*tinkex._EXPORTS, *tinkex._SUBMODULES}
    assert {name: seen[name] for name in tinkex._EXPORTS} == tinkex._EXPORTS


def test_type_checkers_see_every_module_whose_names_types_has() -> None:
    shown = for_type_checkers(types.__file__)
    assert {alias.name for node in shown for alias in node.names} == {"*"}
    assert {node.module for node in shown} == {f"tinkex.types.{name}" for name in types._MODULES}
