"""Imports point one way, and each package loads only what its machine is promised to have.

Read from the source, not from a running interpreter: an import inside a function counts too, except
where the design allows a heavy import to wait until it is needed.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex

ROOT = Path(tinkex.__file__).parent
# Each package may import itself, what stands below it, and the modules that belong to nobody.
BELOW = {
    "types": set(),
    "wire": {"types"},
    "chat": set(),
    "engine": set(),
    "store": {"wire", "types"},
    "regularizers": {"wire", "types", "client"},
    "client": {"chat", "regularizers", "wire", "types"},
    "server": {"chat", "engine", "store", "wire", "types"},
}
FREE = {"errors", "__init__"}
ENGINE_MAY_IMPORT = {"torch", "numpy", "safetensors", "transformers", "triton"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path, *, top_level_only: bool) -> Iterator[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            if node.module == "tinkex":
                yield from ((f"tinkex.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("package", BELOW)
def test_imports_point_one_way(package: str):
    allowed = BELOW[package] | FREE | {package}
    wrong = []
    for path in modules(package):
        for name, line in imports(path, top_level_only=False):
            parts = name.split(".")
            owner = parts[1] if len(parts) > 1 else "__init__"
            if parts[0] == "tinkex" and (ROOT / owner).is_dir() and owner not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_engine_runs_where_only_torch_numpy_safetensors_and_transformers_are():
    import sys

    wrong = []
    for path in modules("engine"):
        for name, line in imports(path, top_level_only=True):
            root = name.split(".")[0]
            if root not in ENGINE_MAY_IMPORT | {"tinkex"} and root not in sys.stdlib_module_names:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["types", "wire", "client", "regularizers", "cli"])
def test_the_sdk_imports_nothing_heavy_until_it_is_needed(package: str):
    """R6 and issue A: `client` needs no torch; custom losses import it when they are called."""
    heavy = {"torch", "transformers", "fastapi", "sqlalchemy", "matplotlib"}
    wrong = []
    for path in modules(package):
        for name, line in imports(path, top_level_only=True):
            if name.split(".")[0] in heavy:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_extra_brings_something_that_is_used():
    """An extra promises a feature: what it installs is imported here, or runs a server or tests."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    used = {
        name.split(".")[0]
        for path in ROOT.rglob("*.py")
        for name, _ in imports(path, top_level_only=False)
    }
    runtime = {"httptools", "psycopg"}  # named as settings of uvicorn and SQLAlchemy
    modules_of = {"pyjwt": "jwt", "prometheus-client": "prometheus_client"}
    for extra, needs in project["optional-dependencies"].items():
        names = {re.split(r"[\[>=; ]", need)[0].lower() for need in needs} - {"tinkex"}
        modules = {modules_of.get(name, name.replace("-", "_")) for name in names} - runtime
        assert extra == "dev" or not modules - used - {"opentelemetry_api"}, extra
