"""Every operation there is: the classes of this folder, each with a row in `wire.endpoints`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.operation import Operation


def _all(base: type[Operation[Any]]) -> Iterator[type[Operation[Any]]]:
    for operation in base.__subclasses__():
        yield operation
        yield from _all(operation)


for _module in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}."):
    importlib.import_module(_module.name)

OPERATIONS: dict[str, type[Operation[Any]]] = {
    operation.name: operation
    for operation in _all(Operation)  # type: ignore[type-abstract]
}


def make_operations(deps: Dependencies) -> dict[str, Operation[Any]]:
    """The operations by name."""
    return {name: operation(deps) for name, operation in OPERATIONS.items()}
