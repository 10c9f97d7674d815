"""The OpenAPI document: bodies and answers as their messages declare them.

Routes read raw bodies and check them through `wire`, so FastAPI does not know their shape. It comes
from the same declarations that the checks do, for people, generators and fuzz tests.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter

from tinkex.wire.endpoints import ENDPOINTS, Endpoint

_REF = "#/components/schemas/{model}"


def install(app: FastAPI) -> None:
    """Add bodies and answers to the document that `app.openapi()` gives.

    It is made once, when it is first asked for, and off the event loop: that takes a tenth of a
    second and more.
    """
    generate, making = app.openapi, threading.Lock()

    def openapi() -> dict[str, Any]:
        with making:
            if app.openapi_schema is None:
                document = generate()
                schemas = document.setdefault("components", {}).setdefault("schemas", {})
                for endpoint in ENDPOINTS.values():
                    path = endpoint.path.replace(":path}", "}")
                    operation = document["paths"][path][endpoint.method.lower()]
                    _describe(operation, endpoint, schemas)
            return app.openapi_schema or document

    async def document_route(_: Request) -> Response:
        content = await asyncio.to_thread(lambda: json.dumps(openapi()).encode())
        return Response(content, media_type="application/json")

    app.openapi = openapi  # type: ignore[method-assign]
    url = str(app.openapi_url)
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", "") != url
    ]
    app.add_route(url, document_route, include_in_schema=False)


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
