"""What mkdocs must know about our pages: test fences, links out of docs/, the notebook, the search.

Pages are written to be read on a code host too. There a link may lead to a source file, and a block
may say `python hosted` for the tests' sake; the site shows the file's path and plain `python`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# Sections of the menu: users do not search the pages of the first; those of the second come after
# the guides, since they have every word somewhere.
BUILDERS, REFERENCE = "For builders", "Look up"
_FENCE = re.compile(r"^```(python|console) (?:hosted|setup)$", re.M)
_OUTWARD = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The notebook with its outputs becomes a page of its own."""
    notebook = Path(config.docs_dir) / "first_steps.ipynb"
    files.append(File.generated(config, "first_steps.md", content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    page.meta["search"] = {
        "exclude": is_in(page, BUILDERS),
        "boost": 0.01 if is_in(page, REFERENCE) else 1,
    }
    depth = page.file.src_uri.count("/") + 1
    return _OUTWARD.sub(
        lambda link: link[0] if _stays(link[0], depth) else f"`{link[2]}`",
        _FENCE.sub(r"```\1", markdown).replace("](first_steps.ipynb)", "](first_steps.md)"),
    )


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The theme's search would fetch a script from a CDN; ours lies beside the pages."""
    up = "../" * page.file.src_uri.count("/")
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{up}assets/file-worker.js")


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    return output.replace("https://unpkg.com/iframe-worker/shim", "assets/file-worker.js")


def is_in(page: Any, title: str) -> bool:
    """Whether a page is in the section `title` of the menu, or in a section below it."""
    return any(section.title == title for section in page.ancestors)


def _stays(link: str, depth: int) -> bool:
    """Whether a link with `../` in it still ends inside docs/."""
    return link.count("../") < depth


def notebook_page(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            parts.append("```text\n" + "".join(output["text"]).rstrip("\n") + "\n```")
    return "\n\n".join(parts) + "\n"
