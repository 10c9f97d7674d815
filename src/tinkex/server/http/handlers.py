"""Put functions at the paths of the endpoints they serve, and write small answers fast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from tinkex.server.guard.auth import CurrentAdmin, CurrentUser
from tinkex.server.http.bodies import read
from tinkex.server.http.dependencies import AppDependencies, dependencies_of
from tinkex.store import User
from tinkex.wire import results
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.generation import JSON

Handler = TypeVar("Handler", bound=Callable[..., Any])
_CALLERS = {"user": CurrentUser, "admin": CurrentAdmin}
_PARTS = frozenset(part.name for part in fields(AppDependencies))
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


class Answer(Response):
    """Bytes of a media type, ready to be sent: the door writes them without asking Starlette."""

    def __init__(self, content: bytes, media_type: str = JSON, status_code: int = 200) -> None:
        self.body, self.status_code, self.background = content, status_code, None
        self.raw_headers = [
            (b"content-length", b"%d" % len(content)),
            (b"content-type", media_type.encode("latin-1")),
        ]


def answer(body: BaseModel | Mapping[str, Any], status: int = 200) -> Answer:
    """A declared result, or a small object, as JSON."""
    content = results.encode(body).content if isinstance(body, BaseModel) else orjson.dumps(body)
    return Answer(content, status_code=status)


def serve(router: APIRouter, name: str, /, **options: Any) -> Callable[[Handler], Handler]:
    """Make a function the handler of an endpoint, at the method and path of its row.

    A function that takes the `request` answers it by itself. Any other has a parameter for what it
    needs: `asked`, the judged body; `user` or, where an admin key is needed, `admin`; fields of
    `AppDependencies`, such as `store`; all else is in the path and the query. It gives the row's
    result, a small object, or None, which is a 204. A key is needed whether it asks for its user or
    not.
    """
    endpoint = ENDPOINTS[name]
    path = endpoint.path.removeprefix(router.prefix)

    def put(handler: Handler) -> Handler:
        declared = inspect.signature(handler, eval_str=True)
        route: Callable[..., Any] = handler
        if "request" not in declared.parameters:
            route = _route(handler, name, declared)
            options["status_code"] = 204 if declared.return_annotation is None else 200
        router.add_api_route(path, route, methods=[endpoint.method], **options)
        return handler

    return put


def _route(
    handler: Callable[..., Any], name: str, declared: inspect.Signature
) -> Callable[..., Any]:
    """A handler as FastAPI and the door call it: with the request and its caller."""
    needs = declared.parameters
    parts = sorted(_PARTS & needs.keys())
    caller = "admin" if "admin" in needs else "user"

    async def route(request: Request, user: User, **arguments: Any) -> Response:
        dependencies = dependencies_of(request)
        for part in parts:
            arguments[part] = getattr(dependencies, part)
        if caller in needs:
            arguments[caller] = user
        if "asked" in needs:
            arguments["asked"] = await read(request, name)
        result = await handler(**arguments)
        if result is None:
            return Response(status_code=204)
        return result if isinstance(result, Response) else answer(result)

    # FastAPI learns from a signature what to look for in path, query and headers: the handler's
    # parameters without those that are filled in above. A callable object with a signature of its
    # own would need no assignment, but FastAPI 0.115 takes such an object for a blocking call.
    filled = {*parts, caller, "asked"}
    own = {"request": Request, "user": _CALLERS[caller]}
    shown = [inspect.Parameter(n, _BY_NAME, annotation=kind) for n, kind in own.items()]
    shown += [p.replace(kind=_BY_NAME) for n, p in needs.items() if n not in filled]
    route.__name__, route.__doc__ = handler.__name__, handler.__doc__
    route.__signature__ = inspect.Signature(shown, return_annotation=Response)  # type: ignore[attr-defined]
    return route
