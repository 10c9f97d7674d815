"""How the server says no: one body shape for every failure.

    {"detail": what is wrong, the value and the fix, "code": a short stable name,
     "category": "user" | "server", "path": the field, when one is to blame,
     "listing": `checkpoints`, `training_runs` or `sessions`, when that route lists what exists}

Every answer is plain JSON with a Content-Length and never compressed, because stock clients take a
400 without one for a torn connection (contract 1.6). This module maps exceptions to answers; it
does not decide when to raise them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tinkex.errors import ConfigError, InvalidInputError, ModelNotFoundError, TinkerError
from tinkex.server.process import disk
from tinkex.store.claim import FencedError
from tinkex.store.writer import StoreClosedError
from tinkex.types.fields.complaints import wanted

logger = logging.getLogger(__name__)


class ApiError(TinkerError):
    """A failure that already knows its HTTP status."""

    code = "api_error"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "",
        path: str = "",
        listing: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.api_code = code or _CODES.get(status, "error")
        self.path = path
        self.listing = listing
        self.headers = dict(headers or {})


_CODES = {
    400: "invalid_input",
    401: "not_authenticated",
    403: "not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    408: "pending",
    409: "conflict",
    410: "gone",
    411: "length_required",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_input",
    429: "too_many_requests",
    500: "internal",
    503: "unavailable",
    507: "disk_full",
}
RETRY_FULL_S = 5


def problem(
    status: int,
    message: str,
    *,
    code: str = "",
    path: str = "",
    listing: str = "",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The one error body as a response."""
    body: dict[str, Any] = {
        "detail": message,
        "code": code or _CODES.get(status, "error"),
        "category": "user" if status < 500 else "server",
    }
    if path:
        body["path"] = path
    if listing:
        body["listing"] = listing
    return Response(
        orjson.dumps(body), status_code=status, media_type="application/json", headers=headers
    )


def response_for(exc: Exception) -> Response:
    """Map any exception to an answer. What we did not foresee is a 500 that names no internals."""
    if isinstance(exc, ApiError):
        return problem(
            exc.status,
            str(exc),
            code=exc.api_code,
            path=exc.path,
            listing=exc.listing,
            headers=exc.headers,
        )
    if isinstance(exc, InvalidInputError):
        return problem(400, str(exc), code=exc.code, path=exc.path)
    if isinstance(exc, ModelNotFoundError):
        return problem(404, str(exc), code=exc.code)
    if isinstance(exc, ConfigError):
        return problem(400, str(exc), code=exc.code)
    if isinstance(exc, RequestValidationError):
        return _validation_problem(exc)
    if isinstance(exc, HTTPException):
        return problem(exc.status_code, str(exc.detail), headers=exc.headers)
    # PostgreSQL's texts hold no NUL, and its driver is what notices one.
    if isinstance(exc, SQLAlchemyError) and "NUL" in str(exc.__cause__ or exc):
        return problem(400, "Text must not contain NUL characters.")
    if (text := disk.trouble(exc)) is not None:
        logger.warning("refused for lack of room: %s", text)
        return problem(507, text, headers={"Retry-After": str(RETRY_FULL_S)})
    # Another server has the database, or this one is ending: where it runs, the request is taken.
    if isinstance(exc, FencedError | StoreClosedError):
        text = "This server takes no more: it stops, or another took its database over. Ask again."
        return problem(503, text, code=exc.code, headers={"Retry-After": str(RETRY_FULL_S)})
    if isinstance(exc, ClientDisconnect):  # whoever hangs up is no trouble of ours
        return problem(499, "The client went away before its request was whole.")
    logger.error("request failed", exc_info=exc)
    return problem(500, disk.describe(exc))


def _validation_problem(exc: RequestValidationError) -> Response:
    first = exc.errors()[0]
    path = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    text = f"must be {wanted(first)}"
    return problem(400, f"{path}: {text}" if path else text, path=path)


def install(
    app: FastAPI, reworded: Callable[[str, Response], Response] = lambda _, ours: ours
) -> None:
    """Make `app` answer every failure in the one shape; `reworded` may change it at a path."""

    async def handle(request: Request, exc: Exception) -> Response:
        return reworded(request.url.path, response_for(exc))

    # A handler of plain Exception answers and raises again, which ends the connection: what may
    # happen in ordinary life (a full disk) is therefore named.
    ours = (TinkerError, RequestValidationError, HTTPException)
    kinds = (*ours, ClientDisconnect, OSError, SQLAlchemyError)
    for kind in (*kinds, Exception):
        app.add_exception_handler(kind, handle)
