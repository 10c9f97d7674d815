"""The words of the code: a docstring says what a thing is with a noun."""

import ast
import re
from pathlib import Path

import tinkex

ROOT = Path(tinkex.__file__).parent
# How many first sentences may still begin with a pronoun.
MAX_PRONOUNS = 392


def first_lines() -> list[str]:
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
    ]


def test_no_docstring_begins_with_a_pronoun():
    pattern = re.compile(r"\S+: (Those|What|It|Who|One)\b")
    riddles = [line for line in first_lines() if pattern.match(line)]
    assert len(riddles) <= MAX_PRONOUNS, "\n".join(riddles)
