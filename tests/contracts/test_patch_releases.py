"""What differs between patch releases of one Python, and is therefore not used.

Debian 12 has Python 3.11.2, and most machines that run these tests have a later one.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tinkex"


def _has_slots(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and any(
        keyword.arg == "slots" and ast.unparse(keyword.value) == "True"
        for keyword in decorator.keywords
    )


def test_no_dataclass_with_slots_has_a_getstate_of_its_own():
    """Before 3.11.4 `dataclass(frozen=True, slots=True)` replaces it, but not `__reduce__`."""
    found = [
        f"{file.relative_to(SOURCE)}: {node.name}.{item.name}"
        for file in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and any(map(_has_slots, node.decorator_list))
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name in ("__getstate__", "__setstate__")
    ]
    assert found == []
