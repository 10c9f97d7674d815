"""Run docs/first_steps.ipynb and store what its cells print, as Jupyter would.

`python dev/notebook.py` after changing a cell. Each cell is compiled with top-level await and runs
in one event loop; no Jupyter is needed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "first_steps.ipynb"


async def run(cells: list[dict[str, Any]]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        count += 1
        source = "".join(cell["source"])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = compile(source, f"cell {count}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            running = eval(code, namespace)
            if inspect.iscoroutine(running):
                await running
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = (
            [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        )


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    asyncio.run(run(notebook["cells"]))
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
