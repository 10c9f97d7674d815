"""Imports point one way, and each package loads only what its machine is promised to have.

Who may import whom stands in the table of docs/architecture.md, and only there. Read from the
source, not from a running interpreter: imports inside functions and those for type checkers count
too, except where the design allows a heavy import to wait until it is needed.
"""

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex

ROOT = Path(tinkex.__file__).parent
PAGE = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
# Modules beside the packages that everyone may import, and that import nothing of ours.
FREE = {"errors", "events"}
# Public modules of the top that are faces of the client.
DOORS = {"auth", "compat"}
# The last two come with transformers.
ENGINE_MAY_IMPORT = {
    *("torch", "numpy", "safetensors", "transformers", "triton"),
    *("tokenizers", "huggingface_hub"),
}
# Folders with more modules than this are hard to read; the order of rooms matters more.
MAX_MODULES = 25


def allowed_by_the_page() -> dict[str, set[str]]:
    """Each package and what its row of the table allows it to import."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", PAGE, re.M)
    return {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows}


def floors_of_the_page() -> dict[str, list[set[str]]]:
    """Each package's rooms, the lowest floor first; "." is the modules beside the rooms."""
    rows = re.findall(r"^\| `(\w+)` \| (`[^|]*<[^|]*`) \|$", PAGE, re.M)
    return {
        package: [set(re.findall(r"`([\w.]+)`", floor)) for floor in cell.split("<")]
        for package, cell in rows
    }


BELOW = allowed_by_the_page()
FLOORS = floors_of_the_page()
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path, *, top_level_only: bool) -> Iterator[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    for node in _at_import_time(tree.body) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write imports in full"
            yield node.module or "", node.lineno
            if node.module == "tinkex":
                yield from ((f"tinkex.{alias.name}", node.lineno) for alias in node.names)


def _at_import_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported: not in functions, not for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_import_time(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _at_import_time(getattr(node, part, []))


def owner(name: str) -> str | None:
    """The package or top module of ours that `name` belongs to; None if it is not ours."""
    parts = name.split(".")
    if parts[0] != "tinkex" or len(parts) == 1 or parts[1].startswith("__"):
        return None
    public = tinkex._EXPORTS.get(parts[1]) or tinkex._SUBMODULES.get(parts[1])
    found = public.split(".")[1] if public else parts[1]
    return "client" if found in DOORS else found


def wrong_imports(path: Path, allowed: set[str]) -> list[str]:
    found = imports(path, top_level_only=False)
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for name, line in found
        if (package := owner(name)) is not None and package not in allowed
    ]


def test_the_page_has_a_row_for_every_package():
    assert set(PACKAGES) == set(BELOW)


def test_the_page_allows_no_cycle():
    order = [*graphlib.TopologicalSorter(BELOW).static_order()]
    assert set(order) == set(BELOW), "a row allows what has no row"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str):
    allowed = BELOW[package] | FREE | {package}
    assert not [wrong for path in modules(package) for wrong in wrong_imports(path, allowed)]


def room(name: str) -> str:
    """The room of the module `tinkex.package.room.module`; "." for a module beside the rooms."""
    parts = name.split(".")
    return parts[2] if len(parts) > 3 else "."


def module_name(path: Path) -> str:
    parts = ("tinkex", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in ROOT.rglob("*.py")}


def imports_between_rooms(path: Path) -> Iterator[tuple[str, str, int]]:
    """(importing room, imported room, line) of each import of another room of the same package."""
    me = module_name(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            module = whole if whole in MODULES else node.module
            if module.split(".")[:2] == me.split(".")[:2] and room(module) != room(me):
                yield room(me), room(module), node.lineno


def upward_imports(path: Path, floors: list[set[str]]) -> list[str]:
    height = {room: number for number, floor in enumerate(floors) for room in floor}
    return [
        f"{path.relative_to(ROOT)}:{line}: {upper} imports {lower}, which is not below it"
        for upper, lower, line in imports_between_rooms(path)
        if height[upper] <= height[lower]
    ]


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_rooms_import_only_rooms_below_them(package: str):
    wrong = [x for path in modules(package) for x in upward_imports(path, FLOORS[package])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_the_page_gives_every_room_one_floor(package: str):
    rooms = {room(module_name(path)) for path in modules(package)}
    shown = [name for floor in FLOORS[package] for name in floor]
    assert sorted(shown) == sorted(rooms | {"."})


def test_modules_beside_the_packages_are_above_or_below_them():
    assert not wrong_imports(ROOT / "__main__.py", {"cli"})
    for path in ROOT.glob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert path.stem in FREE | DOORS, f"{path.name} needs a place"
            assert not wrong_imports(path, {"client"} | FREE if path.stem in DOORS else set())


def test_no_folder_has_more_modules_than_a_reader_can_hold():
    folders = {path.parent for path in ROOT.rglob("*.py")}
    counts = {
        str(folder.relative_to(ROOT)): len({*folder.glob("*.py")} - {folder / "__init__.py"})
        for folder in folders
    }
    assert not {folder: count for folder, count in counts.items() if count > MAX_MODULES}


def test_the_page_shows_every_room():
    """A room is a folder of modules inside a package."""
    rooms = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/*/*.py")}
    rows = re.findall(r"^\| (`\w+/\w+`[^|]*) \|", PAGE, re.M)
    shown = {room for row in rows for room in re.findall(r"`(\w+/\w+)`", row)}
    assert rooms == shown


def test_the_engine_imports_only_what_a_bare_gpu_machine_has():
    """No pydantic, no HTTP, no database, not even inside a function."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules("engine")
        for name, line in imports(path, top_level_only=False)
        if (root := name.split(".")[0]) not in ENGINE_MAY_IMPORT | {"tinkex"}
        and root not in sys.stdlib_module_names
    ]
    assert not wrong


def test_only_the_cluster_imports_ray():
    for path in ROOT.rglob("*.py"):
        if "ray" in {name.split(".")[0] for name, _ in imports(path, top_level_only=False)}:
            assert path.parent == ROOT / "cluster", path


def test_the_declarations_need_the_standard_library_only():
    for path in modules("contract"):
        for name, line in imports(path, top_level_only=False):
            root = name.split(".")[0]
            assert root == "tinkex" or root in sys.stdlib_module_names, f"{path.name}:{line} {name}"


@pytest.mark.parametrize("package", ["types", "wire", "client", "regularizers", "cli"])
def test_the_sdk_imports_nothing_heavy_until_it_is_needed(package: str):
    """R6: `client` needs no torch; custom losses import it when they are called."""
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
    # Named as settings of uvicorn and SQLAlchemy, or imported by FastAPI to read forms.
    runtime = {"httptools", "psycopg", "python_multipart"}
    modules_of = {"pyjwt": "jwt", "prometheus-client": "prometheus_client"}
    for extra, needs in project["optional-dependencies"].items():
        names = {re.split(r"[\[>=; ]", need)[0].lower() for need in needs} - {"tinkex"}
        modules = {modules_of.get(name, name.replace("-", "_")) for name in names} - runtime
        assert extra in ("dev", "docs") or not modules - used - {"opentelemetry_api"}, extra
