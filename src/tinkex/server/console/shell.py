"""What all pages share: their frame, their headers, and what a failure looks like.

A page is a template and facts. The policy sent with it allows no inline script or style and no
other host; `tests/server/console` holds every page to it.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup, escape

from tinkex.server.console.source import console_of, source_of
from tinkex.server.console.visitors import form_token, put_off
from tinkex.server.process import problems
from tinkex.server.process.problems import ApiError
from tinkex.store import User
from tinkex.types.fields.bounds import text

STATIC = Path(__file__).parent / "static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Pages show what users and models wrote: should any of it slip through the escaping, it runs no
# script. No page is shown in a frame, where a visitor could be led to click. No referrer goes to
# other sites, because the address of `/console/enter` holds a token; with none at all a browser
# calls the origin of our own forms null, and a server without keys refuses those.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_templates = Environment(
    loader=PackageLoader("tinkex.server.console"), autoescape=select_autoescape(), trim_blocks=True
)


def _with_code(text: str) -> Markup:
    """A text of the command line's help, its `backticks` as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def byte_size(size: float) -> str:
    """A number of bytes as people read it; `size` of static/server.js writes the same."""
    for unit, factor in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def number(value: float) -> str:
    """A measured value as people read it, with four digits or more."""
    if math.isnan(value):
        return "NaN"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


_templates.filters |= {"with_code": _with_code, "byte_size": byte_size, "number": number}


@cache
def _compile_templates() -> None:
    """Compile all pages, which takes a tenth of a second: with the first visit, off the loop."""
    for name in _templates.list_templates():
        _templates.get_template(name)


class PageRoute(APIRoute):
    """A page that needs a login sends there; any other failure is a page too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def reply(request: Request) -> Response:
            if not _compile_templates.cache_info().currsize:
                await asyncio.to_thread(_compile_templates)
            try:
                response = await handle(request)
            except Exception as exc:
                response = _failure(request, problems.response_for(put_off(request, exc)))
            response.headers.update(HEADERS)
            return response

        return reply


def _failure(request: Request, ours: Response) -> Response:
    if "/api/" in request.url.path:
        return ours
    is_asked = request.method == "GET"
    if is_asked and ours.status_code == 401 and request.url.path != "/console/login":
        return RedirectResponse("/console/login", status_code=303)
    told = orjson.loads(ours.body)
    user = getattr(request.state, "visitor", None)
    facts = {"message": told["detail"], "back": back_of(request)}
    return page(request, "failure.html", user, ours.status_code, **facts)


def confirmation(
    request: Request,
    user: User,
    question: str,
    detail: str,
    verb: str,
    values: Sequence[tuple[str, str]],
) -> Response:
    """A page that asks before the form it stands for is taken; `values` are sent again."""
    return page(
        request,
        "confirm.html",
        user,
        question=question,
        detail=detail,
        verb=verb,
        values=values,
        back=back_of(request),
    )


def back_of(request: Request) -> str:
    """The page of ours whose form or link led here; the list of runs where that is unknown."""
    came_from = urlsplit(request.headers.get("referer", ""))
    is_ours = came_from.netloc == request.url.netloc and came_from.path.startswith("/console")
    if not is_ours or came_from.path == request.url.path:
        return "/console"
    return f"{came_from.path}?{came_from.query}" if came_from.query else came_from.path


def page(
    request: Request, name: str, user: User | None, status: int = 200, **facts: Any
) -> Response:
    """A template with its facts. `user` None: nobody is logged in."""
    text = _templates.get_template(name).render(
        user=user,
        path=request.url.path,
        is_open=console_of(request).auth.is_open,
        is_local=source_of(request).is_local,
        is_admin=getattr(request.state, "is_admin", False),
        form_token=form_token(request),
        **facts,
    )
    return HTMLResponse(text, status_code=status)


router = APIRouter(prefix="/console/static", route_class=PageRoute, include_in_schema=False)


@router.get("/{name}")
async def static(name: Annotated[str, text(200)]) -> Response:
    file = STATIC / name
    if Path(name).name != name or file.suffix not in KINDS or not file.is_file():
        raise ApiError(404, "There is no such file.")
    content = await asyncio.to_thread(file.read_bytes)
    return Response(content, media_type=KINDS[file.suffix])
