"""The table of endpoints is what the server serves, no more and no less."""

from __future__ import annotations

from fastapi.routing import APIRoute

from tinkex.server.app import _OURS
from tinkex.server.operations.table import OPERATIONS
from tinkex.server.rest.install import MODULES
from tinkex.wire.endpoints import ENDPOINTS

OPERATORS = {"/healthz", "/readyz", "/metrics"}
"""What is for those who run the server, and no part of the protocol."""


def served() -> set[tuple[str, str]]:
    routers = [*_OURS, *(module.router for module in MODULES)]
    routes = [route for router in routers for route in router.routes]
    return {
        (method, route.path)
        for route in routes
        if isinstance(route, APIRoute) and route.path not in OPERATORS
        for method in route.methods
    }


def test_every_route_has_a_row_and_every_row_a_route() -> None:
    assert served() == {(row.method, row.path) for row in ENDPOINTS.values()}


def test_operations_behave_as_their_rows_say() -> None:
    for operation in OPERATIONS:
        row = ENDPOINTS[operation.name]
        assert row.changes_state == operation.changes_state, operation.name
        assert row.is_barrier == operation.is_barrier, operation.name
    ordered = {row.name for row in ENDPOINTS.values() if row.is_ordered}
    assert ordered == {operation.name for operation in OPERATIONS} - {"create_model"}
