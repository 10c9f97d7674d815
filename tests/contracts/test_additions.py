"""The table "to add ... touch ..." of CONTRIBUTING.md is true of what was added last."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

import tinkex

ROOT = Path(tinkex.__file__).parent
PAGE = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
MOST = {"a loss": 2, "an optimizer": 3, "a sampling parameter": 4}
OTHERS = {"an endpoint": 3, "an operation": 2}
"""Their files have names of their own."""
ROW = re.compile(r"^\| (an? [a-z ]+) \| (.+) \| (\d) \| (.+) \|$", re.M)


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


ROWS = {
    what: (names(files), int(most), names(done)) for what, files, most, done in ROW.findall(PAGE)
}


def mentions(name: str) -> set[str]:
    """Modules whose code says a name: in a name of their own, or as a text that is just that."""
    word = re.compile(rf"(?<![a-z]){name}(?![a-z])|{name.title()}[A-Z]")
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if says(path, name, word)}
    # OpenAI's protocol has names of its own, some of them the same as ours.
    return {path for path in found if not path.startswith("server/compat/")}


def says(path: Path, name: str, word: re.Pattern[str]) -> bool:
    text = path.read_text(encoding="utf-8")
    if name not in text:
        return False
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    return any(
        (token.type == tokenize.NAME and word.search(token.string))
        or (token.type == tokenize.STRING and token.string.strip("\"'") == name)
        for token in tokens
    )


def test_every_row_stays_within_its_number():
    assert {what: most for what, (_, most, _) in ROWS.items()} == MOST | OTHERS
    for what in MOST:
        files, most, _ = ROWS[what]
        assert len(files) <= most, what
        assert all((ROOT / file).is_file() for file in files), what


@pytest.mark.parametrize("what", MOST)
def test_what_was_added_is_mentioned_nowhere_else(what: str):
    files, _, done = ROWS[what]
    assert done
    for name in done:
        assert mentions(name) == set(files), f"{what} {name}"
