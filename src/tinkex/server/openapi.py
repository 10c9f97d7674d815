"""The OpenAPI document: bodies and answers as their messages declare them.

Routes read raw bodies and check them through `wire`, so FastAPI does not know their shape. It comes
from the same declarations that the checks do, for people, generators and fuzz tests.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from tinkex.wire.endpoints import ENDPOINTS, Endpoint

_REF = "#/components/schemas/{model}"


def install(app: FastAPI) -> None:
    """Add bodies and answers to the document that `app.openapi()` gives."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for endpoint in ENDPOINTS.values():
                path = endpoint.path.replace(":path}", "}")
                operation = document["paths"][path][endpoint.method.lower()]
                _describe(operation, endpoint, schemas)
        return app.openapi_schema or document

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(operation: dict[str, Any], endpoint: Endpoint, schemas: dict[str, Any]) -> None:
    if endpoint.request is not None:
        content = {"application/json": {"schema": _schema(endpoint.request, schemas)}}
        operation["requestBody"] = {"required": True, "content": content}
    if endpoint.result is not None:
        content = {"application/json": {"schema": _schema(endpoint.result, schemas)}}
        operation["responses"]["200"] = {"description": "Successful Response", "content": content}


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of a message; those of its parts go to `schemas`."""
    schema = TypeAdapter(kind).json_schema(ref_template=_REF, mode="validation")
    schemas.update(schema.pop("$defs", {}))
    return schema
