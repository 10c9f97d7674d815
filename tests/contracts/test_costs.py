"""Everything that a request can ask for has a bound on what it becomes.

The walk goes over every field of every message: of the protocol, of the other APIs, of paths,
queries and forms. A text needs a longest length, a list and a map a largest size, a whole number a
range and a word on what so many of it are (`Between.becomes`); and the message has to limit the
unit in which that is counted (`Endpoint.limit`, `ForeignBody.limit`). JSON of any form is allowed
where the message as a whole limits its parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

import tinkex
from tinkex.contract.bounds import Between
from tinkex.contract.cost import NOTHING, RESULT, UNITS, Cost
from tinkex.server.compat.fields import ForeignBody
from tinkex.server.process.config import ServerConfig
from tinkex.wire import tinker_public_pb2 as pb
from tinkex.wire.budget import REQUEST
from tinkex.wire.endpoints import ENDPOINTS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
from app_world import open_app

REQUESTS = [row.name for row in ENDPOINTS.values() if row.request is not None]
MAX_TEXT = 2**24
"""A text in a message, in characters. Bodies are shorter, so none becomes more than was sent."""
_CHOICES = ("anyOf", "oneOf", "allOf")
_PARTS = ("sent_bytes", "containers", "keys", "values", "depth")
"""The units that bound JSON of any form."""


class Walk:
    """The faults of a message's JSON schema, each a path and what is wrong there."""

    def __init__(self, schema: dict[str, Any], limit: Cost, *, free_form: bool, counts: bool):
        """`free_form`: JSON of any form is taken; `counts`: numbers say what they become."""
        self._definitions = schema.get("$defs", {})
        self._limit, self._free_form, self._counts = limit, free_form, counts

    def faults(self, schema: Any, path: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in seen:
                yield from self.faults(self._definitions[name], path, seen | {name})
            return
        for choice in (choice for word in _CHOICES for choice in schema.get(word, ())):
            yield from self.faults(choice, path, seen)
        if "const" in schema or "enum" in schema:
            return
        kinds = schema.get("type", [])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            yield from getattr(self, f"_{kind}", self._harmless)(schema, path, seen)
        if not kinds and not any(word in schema for word in _CHOICES) and not self._free_form:
            yield f"{path}: anything at all"

    def _harmless(self, schema: Any, path: str, seen: frozenset[str]) -> Iterator[str]:
        """True, false, null, and numbers that are not whole, which count nothing."""
        yield from ()

    def _string(self, schema: Any, path: str, seen: frozenset[str]) -> Iterator[str]:
        is_moment = schema.get("format") in ("date-time", "date")
        if not is_moment and schema.get("maxLength", MAX_TEXT + 1) > MAX_TEXT:
            yield f"{path}: text"

    def _integer(self, schema: Any, path: str, seen: frozenset[str]) -> Iterator[str]:
        least = schema.get("minimum", schema.get("exclusiveMinimum"))
        most = schema.get("maximum", schema.get("exclusiveMaximum"))
        if least is None or most is None:
            yield f"{path}: integer"
        elif self._counts:
            yield from self._becoming(schema.get("x-becomes"), path)

    def _becoming(self, unit: str | None, path: str) -> Iterator[str]:
        if unit is None:
            yield f"{path}: a number that does not say what it becomes (Between.becomes)"
        elif unit != NOTHING and (unit not in UNITS or not getattr(self._limit, unit)):
            yield f"{path}: becomes {unit}, which the message does not limit"

    def _array(self, schema: Any, path: str, seen: frozenset[str]) -> Iterator[str]:
        if "maxItems" not in schema:
            yield f"{path}: list"
        items = [item for item in (schema.get("items"), *schema.get("prefixItems", ())) if item]
        if "x-becomes" in schema:
            yield from self._becoming(schema["x-becomes"], path)
            # What its numbers are is said of all of them; each has the 64 bits of its type.
            items = [item for item in items if item.get("type") not in ("integer", "number")]
        for item in items:
            yield from self.faults(item, f"{path}[]", seen)

    def _object(self, schema: Any, path: str, seen: frozenset[str]) -> Iterator[str]:
        for name, part in schema.get("properties", {}).items():
            yield from self.faults(part, f"{path}.{name}", seen)
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            yield from self.faults(extra, f"{path}.*", seen)
        for part in schema.get("patternProperties", {}).values():
            yield from self.faults(part, f"{path}.*", seen)
        if isinstance(extra, dict) or "patternProperties" in schema:
            names = {"type": "string", **schema.get("propertyNames", {})}
            yield from self.faults(names, f"{path} (names)", seen)
        if "maxProperties" in schema or self._free_form:
            return
        if extra:
            yield f"{path}: map"
        if not schema.get("properties"):
            yield f"{path}: object"


def faults_of(
    kind: Any, path: str, limit: Cost, *, free_form: bool = False, counts: bool = True
) -> list[str]:
    schema = TypeAdapter(kind).json_schema(mode="validation")
    return [*Walk(schema, limit, free_form=free_form, counts=counts).faults(schema, path)]


# ---------------------------------------------------------------------------------- the protocol


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_of_a_request_is_bounded_in_what_it_becomes(name: str) -> None:
    row = ENDPOINTS[name]
    assert faults_of(row.request, name, row.limit) == []


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_of_the_protocol_limits_its_parts(name: str) -> None:
    """Fields multiply: each may be in bounds, and the whole a billion objects."""
    limit = ENDPOINTS[name].limit
    assert all(getattr(limit, unit) for unit in _PARTS), limit


def test_every_field_of_protobuf_is_counted_or_weighs_what_was_sent() -> None:
    """Both generations of the SDK send passes as protobuf, large ones in that form alone."""

    def uncounted(message: Any, schema: dict[int, Any], path: str) -> Iterator[str]:
        for field in message.fields:
            here = f"{path}.{field.name}"
            if field.message_type is not None:
                if field.number not in schema:
                    yield here
                else:
                    yield from uncounted(field.message_type, schema[field.number], here)
            elif field.default_value == [] and field.number not in schema:
                yield here

    assert list(uncounted(pb.ForwardBackwardRequest.DESCRIPTOR, REQUEST, "request")) == []


# ---------------------------------------------------------------------------------- other APIs


def _bodies(kind: type[ForeignBody] = ForeignBody) -> Iterator[type[ForeignBody]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _bodies(inner)


BODIES = {kind.__name__: kind for kind in _bodies() if "model" in kind.model_fields}
"""Those that are whole requests."""


@pytest.mark.parametrize("name", BODIES)
def test_every_field_of_a_foreign_body_is_bounded_in_what_it_becomes(name: str) -> None:
    kind = BODIES[name]
    assert faults_of(kind, name, kind.limit, free_form=True) == []
    assert all(getattr(kind.limit, unit) for unit in _PARTS), kind.limit


def test_all_dialects_are_walked() -> None:
    names = {"ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"}
    assert names < BODIES.keys()


# ---------------------------------------------------------------------------------- routes


def _routes(routes: Any) -> Iterator[APIRoute]:
    """All of them; newer versions of FastAPI keep routers as they were given."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif (inner := getattr(route, "original_router", None)) is not None:
            yield from _routes(inner.routes)


def _parameters(dependant: Any) -> Iterator[Any]:
    for where in ("path", "query", "header", "cookie", "body"):
        yield from getattr(dependant, f"{where}_params")
    for inner in dependant.dependencies:
        yield from _parameters(inner)


async def test_every_part_of_a_path_a_query_or_a_form_is_bounded(tmp_path: Path) -> None:
    """REST, administration, the console and its forms. Numbers there are their own limits."""
    async with open_app(tmp_path) as world:
        routes = [*_routes(world.app.routes)]
    assert len(routes) > 100
    faults = [
        f"{route.path} {fault}"
        for route in routes
        for parameter in _parameters(route.dependant)
        for fault in faults_of(
            Annotated[(parameter.field_info.annotation, *parameter.field_info.metadata, "")],
            parameter.name,
            Cost(),
            counts=False,
        )
    ]
    assert faults == []


def test_no_route_reads_a_body_without_its_message() -> None:
    """`request.json()` and the like take whatever comes; `http.bodies` knows limits."""
    server = Path(tinkex.__file__).parent / "server"
    reads = {
        str(file.relative_to(server))
        for file in server.rglob("*.py")
        for word in ("request.json()", "request.body()", "request.stream()", "request.form(")
        if word in file.read_text()
    }
    # One token of a form, among at most 50 fields of at most 1 MiB.
    assert reads <= {"console/visitors.py"}


# ---------------------------------------------------------------------------------- the walk itself


def test_the_walk_finds_what_has_no_bound() -> None:
    assert faults_of(dict[str, list[str | int]], "x", Cost()) == [
        "x.*: list",
        "x.*[]: text",
        "x.*[]: integer",
        "x (names): text",
        "x: map",
        "x: object",
    ]
    assert faults_of(Any, "x", Cost()) == ["x: anything at all"]


def test_the_walk_finds_what_stands_in_tuples_and_choices() -> None:
    pair = tuple[str, Annotated[int, Between(0, 9, becomes=NOTHING)]]
    assert faults_of(pair, "x", Cost()) == ["x[]: text"]
    assert faults_of(pair | list[int] | None, "x", Cost()) == [
        "x[]: text",
        "x: list",
        "x[]: integer",
    ]


def test_the_walk_finds_numbers_whose_unit_has_no_limit() -> None:
    bounded, counted = Annotated[int, Between(0, 9)], Annotated[int, Between(0, 9, becomes="draws")]
    (said,) = faults_of(bounded, "x", Cost())
    assert "does not say what it becomes" in said
    assert faults_of(counted, "x", Cost()) == ["x: becomes draws, which the message does not limit"]
    assert faults_of(counted, "x", Cost(draws=1)) == []


def test_a_servers_own_limit_on_results_is_that_of_a_sample() -> None:
    assert ServerConfig().max_sample_bytes == RESULT.result_bytes
