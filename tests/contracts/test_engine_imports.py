"""The engine runs on a machine that has torch, numpy, safetensors, transformers, and no more."""

from __future__ import annotations

import ast
from pathlib import Path

import tinkex

ENGINE = Path(tinkex.__file__).parent / "engine"
ALLOWED = {
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "triton",
}
OURS = ("tinkex.engine", "tinkex.errors", "tinkex.contract")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return found


def test_the_engine_imports_only_what_a_bare_gpu_machine_has():
    """No pydantic, no HTTP, no database; transformers brings tokenizers and huggingface_hub."""
    import sys

    for path in sorted(ENGINE.rglob("*.py")):
        for name in imports(path):
            root = name.partition(".")[0]
            allowed = root in ALLOWED or root in sys.stdlib_module_names or name.startswith(OURS)
            assert allowed, f"{path.name} imports {name}"
