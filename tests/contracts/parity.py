"""Compare our public names with the official ones, and write the tables of docs/parity.md.

    python tests/contracts/parity.py --write

The official names were recorded by tests/golden/record.py. A name's state is computed, never typed:
`yes` when it exists here under the same name, else the reason below, else `planned`.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "parity.md"
GOLDEN = ROOT / "tests" / "golden"
SDKS = ("0.4.1", "0.36.0")

# Names that will not come, each with what to use instead.
NOT_KEPT = {
    ("TrainingClient", "save_weights_and_get_sampling_client_submit"): (
        "0.4.1 internals; call `save_weights_and_get_sampling_client`"
    ),
}
# Members of official types that are hooks of its pydantic models, not for callers.
HOOKS = frozenset(
    {"convert_tensors", "serialize_data", "serialize_dmel", "validate_data", "validate_dmel"}
)


@dataclass(frozen=True)
class Name:
    """One official public name, and how it stands here."""

    scope: str
    name: str
    sdks: tuple[str, ...]
    state: str
    where: str

    def row(self) -> str:
        marks = " | ".join("yes" if sdk in self.sdks else "-" for sdk in SDKS)
        return f"| `{self.name}` | {marks} | {self.where} | {self.state} |"


def recorded(key: str) -> Iterator[tuple[str, str, list[str]]]:
    """(sdk, scope, names) of a recorded table."""
    for sdk in SDKS:
        table = json.loads((GOLDEN / f"sdk-{sdk}.json").read_text())[key]
        for scope, names in table.items():
            yield sdk, scope, names


def names() -> list[Name]:
    seen: dict[tuple[str, str], list[str]] = {}
    for sdk, scope, listed in recorded("names"):
        for name in listed:
            seen.setdefault((scope, name), []).append(sdk)
    return [_judged(scope, name, tuple(sdks)) for (scope, name), sdks in sorted(seen.items())]


def _judged(scope: str, name: str, sdks: tuple[str, ...]) -> Name:
    owner = {"tinker": "tinkex", "tinker.types": "tinkex.types"}.get(scope, f"tinkex.{scope}")
    if _exists(owner, name):
        return Name(scope, name, sdks, "yes", f"`{owner}.{name}`")
    if (scope, name) in NOT_KEPT:
        return Name(scope, name, sdks, "not kept", NOT_KEPT[scope, name])
    return Name(scope, name, sdks, "planned", f"`{owner}.{name}`")


def _exists(owner: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(owner)
    except ModuleNotFoundError:
        package, _, attribute = owner.rpartition(".")
        found = getattr(importlib.import_module(package), attribute, None)
    return hasattr(found, name)


def missing_members() -> list[str]:
    """Fields and methods of official types that ours lack."""
    from tinkex import types

    lacking = []
    for sdk, kind, members in recorded("members"):
        ours = getattr(types, kind)
        fields = {*getattr(ours, "model_fields", ()), *getattr(ours, "__dataclass_fields__", ())}
        lacking += [
            f"{sdk}: {kind}.{member}"
            for member in members
            if member not in HOOKS and member not in fields and not hasattr(ours, member)
        ]
    return lacking


def table() -> str:
    lines: list[str] = []
    scope = ""
    for item in names():
        if item.scope != scope:
            scope = item.scope
            lines += ["", f"### {scope}", "", "| name | 0.4.1 | 0.36 | Tinkex | state |"]
            lines.append("|---|---|---|---|---|")
        lines.append(item.row())
    return "\n".join(lines).strip()


def page_table() -> str:
    """The table as it stands in the page."""
    found = re.search(r"<!-- names -->\n(.*?)\n<!-- /names -->", PAGE.read_text(), re.DOTALL)
    assert found is not None, f"{PAGE.name} has lost its `names` markers"
    return found[1]


def write() -> None:
    text = PAGE.read_text()
    block = f"<!-- names -->\n{table()}\n<!-- /names -->"
    PAGE.write_text(re.sub(r"<!-- names -->.*?<!-- /names -->", lambda _: block, text, flags=re.S))


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        print(table())
