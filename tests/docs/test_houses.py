"""Pages for users and pages for builders: the search has the pages for users only."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_site import ROOT, build_site, pages_of_nav

BUILDERS = "For builders"


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> set[str]:
    """The pages of the search index."""
    documents = build_site(tmp_path_factory.mktemp("site"))
    return {document["location"].partition("#")[0] for document in documents}


def html(file: str) -> str:
    return str(Path(file).with_suffix(".html"))


def test_the_menu_has_the_five_rooms_of_users_and_one_of_builders():
    titles = list(pages_of_nav())
    assert titles == ["Home", "Start", "Train", "Use", "Serve", "Look up", BUILDERS]


def test_every_page_is_in_the_menu_once():
    listed = [file for files in pages_of_nav().values() for file in files]
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(written | {"first_steps.md"})


def test_pages_for_builders_are_not_searched(searched):
    assert searched & {html(file) for file in pages_of_nav()[BUILDERS]} == set()


def test_every_page_for_users_is_searched(searched):
    sections = pages_of_nav()
    users = [file for title in sections if title != BUILDERS for file in sections[title]]
    assert {html(file) for file in users} - searched == set()
