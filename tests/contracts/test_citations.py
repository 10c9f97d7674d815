"""Every "contract 5.7", "(5.7)" and "R14" in code and tests leads to a section or row in docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import tinkex

ROOT = Path(tinkex.__file__).parents[2]
WIRE = (ROOT / "docs" / "wire.md").read_text()
PROMISES = (ROOT / "docs" / "promises.md").read_text()
SECTIONS = set(re.findall(r"^##+ (\d+(?:\.\d+)?)\.? ", WIRE, re.M))
ROWS = set(re.findall(r"^\| (R\d+) \|", PROMISES, re.M))

_NUMBER = r"\d{1,2}\b(?:\.\d{1,2}\b)?"
_LIST = rf"{_NUMBER}(?:(?:, | and | to ){_NUMBER})*"
_CONTRACT = re.compile(rf"\bcontract(?:'s)?(?: section| table)?s? ({_LIST})\b")
_BARE = re.compile(r"(?<=[\s])\((\d{1,2}\.\d{1,2}(?:, \d{1,2}\.\d{1,2})*)\)")
_ROW = re.compile(r"\bR\d{1,2}\b")


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("src", "tests", "benchmarks", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".proto", ".md"} and path != Path(__file__):
                yield str(path.relative_to(ROOT)), path.read_text()


def cited_sections(name: str, text: str) -> set[str]:
    found = [match[1] for match in _CONTRACT.finditer(text)]
    if name.startswith(("src/tinkex/client", "src/tinkex/conformance")):
        found += [match[1] for match in _BARE.finditer(text)]
    return {number for item in found for number in re.findall(_NUMBER, item)}


def test_a_cited_section_of_the_contract_exists():
    cited = {(name, number) for name, text in sources() for number in cited_sections(name, text)}
    assert len(cited) > 40, "the pattern no longer finds the citations"
    assert not {(name, number) for name, number in cited if number not in SECTIONS}


def test_a_reference_within_the_contract_leads_somewhere():
    text = re.sub(r"```.*?```", "", WIRE, flags=re.S)
    cited = set(
        re.findall(r"\((\d{1,2}\.\d{1,2})\)|(?:of|in|as in|see) (\d{1,2}\.\d{1,2})\b", text)
    )
    numbers = {number for pair in cited for number in pair if number}
    assert len(numbers) > 15
    assert not numbers - SECTIONS


def test_a_cited_promise_exists():
    wrong = [
        f"{name}: {row}"
        for name, text in sources()
        for row in set(_ROW.findall(text))
        if row not in ROWS
    ]
    assert not wrong


def test_every_promise_is_proved_by_a_test_that_names_it():
    tests = "".join(text for name, text in sources() if name.startswith("tests/"))
    named = set(_ROW.findall(tests))
    # "R11-R13" names the rows between its ends too.
    for first, last in re.findall(r"\bR(\d+)-R(\d+)\b", tests):
        named |= {f"R{number}" for number in range(int(first), int(last) + 1)}
    assert {f"R{number}" for number in range(1, 35)} == ROWS
    assert not ROWS - named


def test_every_check_of_the_conformance_suite_stands_under_a_section():
    folder = ROOT / "src" / "tinkex" / "conformance"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    sections = re.findall(r"^@check\(\s*\"([^\"]*)\"", text, re.M)
    assert len(sections) > 40, "the pattern no longer finds the checks"
    assert not set(sections) - SECTIONS
