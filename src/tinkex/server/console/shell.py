"""What all pages share: their frame, their headers, and what a failure looks like.

A page is a template and facts. The policy sent with it allows no inline script or style and no
other host; `tests/server/console` holds every page to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, select_autoescape

from tinkex.server.console.source import console_of, source_of
from tinkex.server.console.visitors import form_token, put_off
from tinkex.server.process import problems
from tinkex.server.process.problems import ApiError
from tinkex.store import User

STATIC = Path(__file__).parent / "static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Pages show what users and models wrote: should any of it slip through the escaping, it runs no
# script. No page is shown in a frame, where a visitor could be led to click. No referrer, because
# the address of `/console/enter` holds a token.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_templates = Environment(
    loader=PackageLoader("tinkex.server.console"), autoescape=select_autoescape(), trim_blocks=True
)


class PageRoute(APIRoute):
    """A page that needs a login sends there; any other failure is a page too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def reply(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as exc:
                response = _failure(request, problems.response_for(put_off(request, exc)))
            response.headers.update(HEADERS)
            return response

        return reply


def _failure(request: Request, ours: Response) -> Response:
    if "/api/" in request.url.path or request.method != "GET":
        return ours
    if ours.status_code == 401 and request.url.path != "/console/login":
        return RedirectResponse("/console/login", status_code=303)
    told = orjson.loads(ours.body)
    return page(request, "failure.html", None, ours.status_code, message=told["detail"])


def page(
    request: Request, name: str, user: User | None, status: int = 200, **facts: Any
) -> Response:
    """A template with its facts. `user` None: nobody is logged in."""
    text = _templates.get_template(name).render(
        user=user,
        is_open=console_of(request).auth.is_open,
        is_local=source_of(request).is_local,
        is_admin=getattr(request.state, "is_admin", False),
        form_token=form_token(request),
        **facts,
    )
    return HTMLResponse(text, status_code=status)


router = APIRouter(prefix="/console/static", route_class=PageRoute, include_in_schema=False)


@router.get("/{name}")
async def static(name: str) -> Response:
    file = STATIC / name
    if Path(name).name != name or file.suffix not in KINDS or not file.is_file():
        raise ApiError(404, "There is no such file.")
    content = await asyncio.to_thread(file.read_bytes)
    return Response(content, media_type=KINDS[file.suffix])
