"""The pages of docs/ as a site with its search, as `make docs` builds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def build_site(folder: Path) -> list[dict[str, Any]]:
    """Build the site into `folder`; returns the documents of its search index."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return json.loads((folder / "search" / "search_index.json").read_text())["docs"]


def pages_of_nav() -> dict[str, list[str]]:
    """The files of each section of the site's menu."""
    from mkdocs.config import load_config

    nav: list[dict[str, Any]] = load_config(str(ROOT / "mkdocs.yml"))["nav"]
    return {title: _files(part) for section in nav for title, part in section.items()}


def _files(part: Any) -> list[str]:
    if isinstance(part, str):
        return [part]
    parts = part.values() if isinstance(part, dict) else part
    return [file for inner in parts for file in _files(inner)]
