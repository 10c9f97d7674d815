"""What a reader of the documentation types into its search, and the page that comes first."""

from __future__ import annotations

import pytest
from chromium import needs_chromium, open_page, until
from docs_site import build_site

pytestmark = needs_chromium

FIRST = {
    "warmup": "hyperparameters.html",
    "hyperparameters": "hyperparameters.html",
    "ollama": "serving-an-export.html",
    "vllm": "serving-an-export.html",
    "troubleshooting": "troubleshooting.html",
    "faq": "troubleshooting.html",
    "name a run": "organising-runs.html",
    "evaluate": "evaluation.html",
    "lm-eval": "evaluation.html",
    "out of memory": "troubleshooting.html",
    "trl": "coming-from-trl.html",
    "several gpus": "several-gpus.html",
    "model folder": "your-own-model.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


def test_a_search_finds_the_page_for_users_first(site):
    """Opened from its folder, as `make docs` leaves it."""
    with open_page("file://") as page:
        page.goto(f"{site.as_uri()}/index.html")
        found = {words: first_result(page, words) for words in FIRST}
    assert found == FIRST


def first_result(page, words: str) -> str:
    """The file of the first page that the search lists."""
    page.click("input.md-search__input")
    page.fill("input.md-search__input", "")
    until(page, "document.querySelectorAll('.md-search-result__item').length === 0")
    page.keyboard.insert_text(words)
    page.keyboard.press("End")  # the search listens to keys, and is asked once
    until(page, "document.querySelectorAll('.md-search-result__item').length > 0")
    link = page.locator(".md-search-result__item a").first.get_attribute("href")
    return link.partition("?")[0].partition("#")[0].rpartition("/")[2]
