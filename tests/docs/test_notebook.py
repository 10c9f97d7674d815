"""The example notebook runs inside a running event loop, as Jupyter runs it."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first_steps.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.usefixtures("default_model_dir")
async def test_the_notebook_runs_without_nest_asyncio(toy_server, monkeypatch, capsys):
    """Jupyter compiles each cell with top-level await and runs it in its own loop; so does this."""
    monkeypatch.setenv("TINKER_BASE_URL", toy_server)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, source in enumerate(code_cells()):
        code = compile(source, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, namespace)
        if inspect.iscoroutine(running):
            await running
    losses = namespace["losses"]
    assert isinstance(losses, list)
    assert losses[-1] < losses[0]
    assert "tinker://" in capsys.readouterr().out


def test_the_notebook_is_stored_with_what_its_cells_print():
    """`python dev/notebook.py` writes them."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert bool(cell["outputs"]) == ("print(" in "".join(cell["source"]))
