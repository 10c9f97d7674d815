"""The pages at `/console`, and the JSON behind each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, select_autoescape

from tinkex.server import problems
from tinkex.server.auth import Auth
from tinkex.server.compat import fields, openai_shapes
from tinkex.server.compat.dialogue import Dialogue
from tinkex.server.compat.openai_chat import ChatRequest, Turn
from tinkex.server.console import views
from tinkex.server.console.visitors import COOKIE, Changing, Visitor, form_token, log_in
from tinkex.server.exchange import answer, service_of
from tinkex.server.files.checkpoints import parse_path
from tinkex.server.problems import ApiError
from tinkex.store import Model, User

STATIC = Path(__file__).parent / "static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LIVE_S = 1.0
MAX_COMPARED = 12

_templates = Environment(
    loader=PackageLoader("tinkex.server.console"), autoescape=select_autoescape(), trim_blocks=True
)


class PageRoute(APIRoute):
    """A page that a stranger cannot see sends to the login; any other failure is a page too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def reply(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as exc:
                response = _failure(request, problems.response_for(exc))
            response.headers.update(HEADERS)
            return response

        return reply


router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)


def _failure(request: Request, ours: Response) -> Response:
    if "/api/" in request.url.path or request.method != "GET":
        return ours
    if ours.status_code == 401 and request.url.path != "/console/login":
        return RedirectResponse("/console/login", status_code=303)
    told = orjson.loads(ours.body)
    return _page(request, "failure.html", None, ours.status_code, message=told["detail"])


def _page(
    request: Request, name: str, user: User | None, status: int = 200, **facts: Any
) -> Response:
    auth: Auth = request.app.state.auth
    text = _templates.get_template(name).render(
        user=user, is_open=auth.is_open, form_token=form_token(request), **facts
    )
    return HTMLResponse(text, status_code=status)


async def _run(request: Request, user: User, run_id: str) -> Model:
    service = service_of(request)
    model = await service.store.call(service.store.models.get, run_id)
    if model is None or model.user_id != user.user_id:
        raise ApiError(404, f"No run {run_id[:200]!r} of yours.")
    return model


# ------------------------------------------------------------------------------------ the door


@router.get("/login")
async def login_page(request: Request) -> Response:
    return _page(request, "login.html", None, message="")


@router.post("/login")
async def login(request: Request, key: Annotated[str, Form(max_length=500)]) -> Response:
    response = RedirectResponse("/console", status_code=303)
    try:
        await log_in(request, response, key.strip())
    except ApiError as exc:
        return _page(request, "login.html", None, 401, message=str(exc))
    return response


@router.get("/enter")
async def enter(request: Request, token: Annotated[str, Query(max_length=4000)]) -> Response:
    """Log in by a link with a token that ends within the hour; `tinkex console` makes one."""
    response = RedirectResponse("/console", status_code=303)
    await log_in(request, response, token)
    return response


@router.post("/logout")
async def logout(request: Request, user: Visitor, _: Changing) -> Response:
    response = RedirectResponse("/console/login", status_code=303)
    response.delete_cookie(COOKIE, path="/console")
    return response


@router.get("/static/{name}")
async def static(name: str) -> Response:
    file = STATIC / name
    if Path(name).name != name or file.suffix not in KINDS or not file.is_file():
        raise ApiError(404, "There is no such file.")
    content = await asyncio.to_thread(file.read_bytes)
    return Response(content, media_type=KINDS[file.suffix])


# ------------------------------------------------------------------------------------ runs

Page = Annotated[int, Query(ge=0, le=1_000_000)]
Search = Annotated[str, Query(max_length=200)]
RunIds = Annotated[str, Query(max_length=5000)]


@router.get("")
async def runs_page(request: Request, user: Visitor, page: Page = 0, q: Search = "") -> Response:
    found = await views.runs(service_of(request), user, page=page, search=q)
    return _page(request, "runs.html", user, search=q, **found)


@router.get("/api/runs")
async def runs_json(request: Request, user: Visitor, page: Page = 0, q: Search = "") -> Response:
    return answer(await views.runs(service_of(request), user, page=page, search=q))


@router.get("/runs/{run_id}")
async def run_page(request: Request, user: Visitor, run_id: str) -> Response:
    service = service_of(request)
    model = await _run(request, user, run_id)
    found = await views.run(service, user, model)
    curves = await service.curves.of_run(run_id)
    last = {name: curve.values[-1] for name, curve in sorted(curves.items()) if curve.values}
    return _page(request, "run.html", user, run=found, last=last)


@router.get("/api/runs/{run_id}")
async def run_json(request: Request, user: Visitor, run_id: str) -> Response:
    service = service_of(request)
    model = await _run(request, user, run_id)
    found = await views.run(service, user, model)
    return answer({**found, "curves": views.curves(await service.curves.of_run(run_id))})


@router.get("/api/runs/{run_id}/live")
async def run_live(request: Request, user: Visitor, run_id: str) -> Response:
    """Server-sent events: whatever of the curves grew, once a second."""
    await _run(request, user, run_id)
    return StreamingResponse(_growth(request, user, run_id), media_type="text/event-stream")


async def _growth(request: Request, user: User, run_id: str) -> AsyncIterator[bytes]:
    service = service_of(request)
    seen: dict[str, int] = {}
    while not service.stopping.is_set():
        found = await service.curves.of_run(run_id)
        grown = views.curves(found, seen)
        seen = {name: curve.num_made for name, curve in found.items()}
        told = {"curves": grown, "doing": service.doing(run_id)}
        yield b"data: " + orjson.dumps(told) + b"\n\n"
        await asyncio.sleep(LIVE_S)


@router.get("/compare")
async def compare_page(request: Request, user: Visitor, runs: RunIds = "") -> Response:
    found = await _compared(request, user, runs)
    names = sorted({name for one in found for name in one["settings"]})
    rows = [(name, [one["settings"].get(name) for one in found]) for name in names]
    differing = [(name, values) for name, values in rows if len({str(v) for v in values}) > 1]
    return _page(request, "compare.html", user, runs=found, ids=runs, differing=differing)


@router.get("/api/compare")
async def compare_json(request: Request, user: Visitor, runs: RunIds = "") -> Response:
    service = service_of(request)
    found = await _compared(request, user, runs)
    for one in found:
        one["curves"] = views.curves(await service.curves.of_run(one["run_id"]))
    return answer({"runs": found})


async def _compared(request: Request, user: User, runs: str) -> list[dict[str, Any]]:
    ids = [run_id for run_id in runs.split(",") if run_id][:MAX_COMPARED]
    service = service_of(request)
    return [await views.run(service, user, await _run(request, user, one)) for one in ids]


# ------------------------------------------------------------------------------------ changes


@router.post("/checkpoints")
async def change_checkpoint(
    request: Request,
    user: Visitor,
    _: Changing,
    path: Annotated[str, Form(max_length=1000)],
    action: Annotated[str, Form(max_length=20)],
) -> Response:
    """Publish, unpublish or delete one checkpoint of the visitor's own."""
    service = service_of(request)
    parsed = parse_path(path)
    found = await service.shelf.owned(parsed, user)
    if action == "delete":
        await service.shelf.delete(found)
    elif action in ("publish", "unpublish"):
        public = action == "publish"
        await service.store.call(service.store.checkpoints.set_public, found.path, public)
        service.shelf.log(user.user_id, f"checkpoint_{action}ed", found.path)
    else:
        raise ApiError(400, f"No action {action!r}; use publish, unpublish or delete.")
    return RedirectResponse(f"/console/runs/{parsed.run_id}", status_code=303)


# ------------------------------------------------------------------------------------ playground


@router.get("/playground")
async def playground(request: Request, user: Visitor, model: Search = "") -> Response:
    service = service_of(request)
    rows, _ = await service.store.call(service.store.checkpoints.page, user.user_id, 200, 0)
    names = [*service.catalog.names, *(r.path for r in rows if r.kind == "sampler_weights")]
    return _page(request, "playground.html", user, models=names, chosen=model or names[0])


@router.post("/api/chat")
async def chat(request: Request, user: Visitor, _: Changing) -> Response:
    """The OpenAI endpoint's chat for a visitor with a cookie; streams."""
    body = await fields.read(request, ChatRequest)
    body.ignored()
    dialogue = await Dialogue.open(request, user, body.asked(None))
    return await openai_shapes.streamed(Turn(body, dialogue).lines(), {})
