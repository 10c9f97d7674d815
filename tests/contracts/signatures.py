"""Write the signatures of the clients into docs/parity.md: `python signatures.py --write`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import tinkex

PARITY = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
START, END = "<!-- signatures -->", "<!-- end of signatures -->"
CLASSES = (
    "AdminClient",
    "RecoveringTrainingClient",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
)


def section() -> str:
    """The table as it follows from the code."""
    lines = [START, "", "| call | arguments and defaults |", "|---|---|"]
    for owner in CLASSES:
        for name in sorted(dir(getattr(tinkex, owner))):
            value = inspect.getattr_static(getattr(tinkex, owner), name)
            function = getattr(value, "__func__", value)
            if not name.startswith("_") and inspect.isfunction(function):
                lines.append(f"| `{owner}.{name}` | `{arguments(function)}` |")
    return "\n".join([*lines, "", END])


def arguments(function: object) -> str:
    """`(path, ttl_seconds=None)` without types: names, order and defaults are the promise."""
    given = inspect.signature(function)  # type: ignore[arg-type]
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in given.parameters.items()
        if name != "self"
    ]
    return str(given.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def written() -> str:
    text = PARITY.read_text("utf-8")
    return START + text.partition(START)[2].partition(END)[0] + END


if __name__ == "__main__" and "--write" in sys.argv:
    text = PARITY.read_text("utf-8")
    if START not in text:
        text = text.rstrip() + f"\n\n## Every signature\n\n{START}\n{END}\n"
    before, _, rest = text.partition(START)
    PARITY.write_text(before + section() + rest.partition(END)[2], "utf-8")
