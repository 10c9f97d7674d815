"""Every test that docs/security.md and docs/console.md name exists, and every row names one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import tinkex

ROOT = Path(tinkex.__file__).parents[2]
PAGES = ("docs/security.md", "tests/server/console/README.md")
_FILE = re.compile(r"`((?:[a-z_]+/)+(?:test_[a-z0-9_]+\.py)?)`(?:: ((?:`test_\w+`(?:, )?)+))?")


@cache
def _tests_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


def named(page: str) -> list[tuple[str, list[str]]]:
    """Files of tests that a page names, each with the tests it names."""
    text = (ROOT / page).read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    found = [match for row in rows for match in _FILE.finditer(row)]
    return [(match[1], re.findall(r"`(test_\w+)`", match[2] or "")) for match in found]


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    found = [one for one in named(page) if (ROOT / "tests" / one[0].split("/")[0]).is_dir()]
    assert sum(len(tests) for _, tests in found) > 20, "the pattern no longer finds them"
    for file, tests in found:
        assert (ROOT / "tests" / file).exists(), file
        missing = set(tests) - _tests_of(file) if tests else set()
        assert not missing, (file, missing)


@pytest.mark.parametrize("head", ["| promise |", "| found |", "| what | held by |"])
def test_every_row_of_a_table_of_promises_names_a_test(head: str) -> None:
    pages = [(ROOT / page).read_text() for page in PAGES]
    tables = [part for text in pages for part in text.split("\n\n") if part.startswith(head)]
    assert tables
    for table in tables:
        for row in table.splitlines()[2:]:
            assert _FILE.search(row), row
