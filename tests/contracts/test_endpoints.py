"""The table of endpoints is what the server serves, no more and no less."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from fastapi.routing import APIRoute

import tinkex
from tinkex.server.app import _OURS, REST
from tinkex.server.compat import records
from tinkex.server.operations.table import OPERATIONS
from tinkex.wire.endpoints import ENDPOINTS

SOURCE = Path(tinkex.__file__).parent
SERVED = r'@serve\((router|api), "{}"'
OPERATORS = {"/healthz", "/readyz", "/metrics"}
"""What is for those who run the server, and no part of the protocol."""


def served() -> set[tuple[str, str]]:
    routers = [*_OURS, *(module.router for module in REST), records.router]
    routes = [route for router in routers for route in router.routes]
    return {
        (method, route.path)
        for route in routes
        if isinstance(route, APIRoute) and route.path not in OPERATORS
        for method in route.methods
    }


def test_every_route_has_a_row_and_every_row_a_route() -> None:
    assert served() == {(row.method, row.path) for row in ENDPOINTS.values()}


def test_an_endpoint_is_its_messages_its_row_and_its_function() -> None:
    """The row of CONTRIBUTING: three places in the source, a method of the SDK not counted."""
    routes = {path: path.read_text() for path in (SOURCE / "server").rglob("*.py")}
    for row in ENDPOINTS.values():
        if row.name in {*OPERATIONS, "health"}:
            continue  # a class of server/operations; an operator's route under a second address
        functions = [
            path for path, text in routes.items() if re.search(SERVED.format(row.name), text)
        ]
        assert len(functions) == 1, row.name
        homes = {inspect.getfile(kind) for kind in (row.request, row.result) if kind is not None}
        assert all(Path(home).is_relative_to(SOURCE / "types") for home in homes), row.name
        assert len(homes) <= 2, row.name
