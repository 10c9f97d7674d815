"""The examples: short, and each ends better than it began, which it asserts itself."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_readme_of_them_names_each():
    assert EXAMPLES
    told = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [example.name for example in EXAMPLES if f"({example.name})" not in told] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_says_how_to_run_it_and_asserts_something(example):
    source = example.read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert len(source.splitlines()) < 100
    assert f"python examples/{example.name}" in ast.get_docstring(tree)
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_ends_better_than_it_began(example, tmp_path, default_model_dir):
    env = {key: value for key, value in os.environ.items() if not key.startswith("TINKE")}
    env |= {"TINKEX_CACHE": str(default_model_dir.parents[1]), "TINKEX_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.strip()
