"""Each message is declared once, with a bound on everything a caller can make long or large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from tinkex.cli.commands.checkpoint_delete import _TYPES
from tinkex.store.records import CheckpointKind
from tinkex.types.account.checkpoints import TYPE_BY_KIND
from tinkex.types.fields.bounds import MAX_ID
from tinkex.types.training.forward_backward import MAX_MODEL_ID
from tinkex.wire.endpoints import ENDPOINTS

REQUESTS = [row.name for row in ENDPOINTS.values() if row.request is not None]


def unbounded(schema: Any, definitions: dict[str, Any], path: str, seen: set[str]) -> Iterator[str]:
    """Paths of the parts of a JSON schema that may be of any size."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from unbounded(definitions[name], definitions, path, seen | {name})
        return
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from unbounded(choice, definitions, path, seen)
    if "const" in schema or "enum" in schema:
        return
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        yield from _unbounded_kind(kind, schema, definitions, path, seen)
    if not kinds and not {"anyOf", "oneOf", "allOf"} & schema.keys():
        yield f"{path}: anything at all"


def _unbounded_kind(
    kind: str, schema: Any, definitions: dict[str, Any], path: str, seen: set[str]
) -> Iterator[str]:
    if kind == "string" and schema.get("format") != "date-time" and "maxLength" not in schema:
        yield f"{path}: text"
    if kind == "integer" and path.endswith("[]"):
        return  # an element of a packed array of token ids, which its dtype bounds
    if kind == "integer" and not ({"minimum"} <= schema.keys() and {"maximum"} <= schema.keys()):
        yield f"{path}: integer"
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{path}: list"
        if "items" in schema:
            yield from unbounded(schema["items"], definitions, f"{path}[]", seen)
    if kind == "object":
        for name, part in schema.get("properties", {}).items():
            yield from unbounded(part, definitions, f"{path}.{name}", seen)
        extra = schema.get("additionalProperties")
        if extra and "maxProperties" not in schema:
            yield f"{path}: map"
        if isinstance(extra, dict):
            yield from unbounded(extra, definitions, f"{path}.*", seen)
        if not schema.get("properties") and "maxProperties" not in schema:
            yield f"{path}: object"


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_of_a_request_has_a_bound(name: str) -> None:
    schema = TypeAdapter(ENDPOINTS[name].request).json_schema(mode="validation")
    assert list(unbounded(schema, schema.get("$defs", {}), name, set())) == []


def test_the_walk_finds_what_has_no_bound() -> None:
    schema = TypeAdapter(dict[str, list[str | int]]).json_schema()
    assert list(unbounded(schema, {}, "x", set())) == ["x: map", "x.*: list", "x.*[]: text"] + [
        "x: object"
    ]


def test_paths_and_names_are_unique() -> None:
    assert len({(row.method, row.path) for row in ENDPOINTS.values()}) == len(ENDPOINTS)


def test_what_cannot_read_a_declaration_says_the_same():
    """The store imports nothing of ours, arrays and the command line do without pydantic."""
    assert get_args(CheckpointKind) == tuple(TYPE_BY_KIND)
    assert _TYPES == TYPE_BY_KIND | {kind: kind for kind in TYPE_BY_KIND.values()}
    assert MAX_MODEL_ID == MAX_ID
