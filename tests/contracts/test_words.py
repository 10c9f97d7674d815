"""The words of the code: docstrings begin with nouns, and one page explains the nouns."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex

ROOT = Path(tinkex.__file__).parent
PAGE = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
# Words that only those who wrote this code knew; the field has others for what they meant.
PRIVATE_WORDS = (
    "meeting",
    "seat",
    "pulse",
    "breath",
    "oversight",
    "strangers",
    "relief",
    "holdings",
)


def definitions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield path, node


def test_no_docstring_begins_with_a_pronoun():
    riddles = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path, node in definitions()
        if (text := ast.get_docstring(node)) and re.match(r"(Those|What|It|Who|One)\b", text)
    ]
    assert not riddles, "\n".join(riddles)


@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_nothing_is_named_by_a_private_word(word: str):
    pattern = re.compile(rf"(?:^|_){word}s?(?:_|$)", re.I)
    names = [(path, node.name) for path, node in definitions()]
    names += [(path, path.stem) for path in ROOT.rglob("*.py")]
    # CamelCase to snake_case, so that one pattern reads both.
    snake = [(path, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)) for path, name in names]
    assert not [f"{path.relative_to(ROOT)}: {name}" for path, name in snake if pattern.search(name)]


def words_of_the_page() -> dict[str, str]:
    table = PAGE.split("\n## Words\n")[1]
    return dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", table, re.M)[1:])


def test_the_page_explains_the_nouns_of_the_code_with_a_sentence_each():
    words = words_of_the_page()
    assert len(words) >= 60
    assert list(words) == sorted(words, key=str.lower)
    for word, sentence in words.items():
        assert re.fullmatch(r"[A-Z].{8,140}\.", sentence), f"{word}: {sentence}"


def test_every_word_of_the_page_is_used_in_the_code():
    source = "\n".join(path.read_text() for path in ROOT.rglob("*.py")).lower()
    for word in words_of_the_page():
        pattern = re.sub(r"[ -]", "[ _-]?", word.lower())
        assert re.search(pattern, source), word
