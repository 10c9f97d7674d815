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


def test_no_archive_is_unpacked_with_a_filter_by_name():
    """`extractall(filter=)` came in 3.11.4; two tests that had it failed on Debian 12 alone."""
    root = SOURCE.parents[1]
    found = [
        f"{file.relative_to(root)}:{node.lineno}"
        for folder in ("src", "tests", "dev", "benchmarks")
        for file in sorted((root / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith((".extractall", ".extract", "unpack_archive"))
        and any(keyword.arg == "filter" for keyword in node.keywords)
    ]
    assert found == []
