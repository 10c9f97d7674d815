"""The pages of a server that change something: its door, checkpoints, tags, what is kept."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from tinkex.server.console.shell import PageRoute, page
from tinkex.server.console.source import source_of
from tinkex.server.console.visitors import Changing, Visitor, cookie_name, log_in, put_off
from tinkex.server.files.checkpoints import parse_path
from tinkex.server.http.dependencies import service_of
from tinkex.server.process.problems import ApiError
from tinkex.server.rest.files import archive

MAX_TAGS = 20
MAX_TAG = 60
router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)

# ------------------------------------------------------------------------------------ the door


@router.get("/login")
async def login_page(request: Request) -> Response:
    return page(request, "login.html", None, message="")


@router.post("/login")
async def login(request: Request, key: Annotated[str, Form(max_length=500)]) -> Response:
    response = RedirectResponse("/console", status_code=303)
    try:
        await log_in(request, response, key.strip())
    except ApiError as exc:
        told = put_off(request, exc)
        assert isinstance(told, ApiError)
        refused = page(request, "login.html", None, told.status, message=str(told))
        refused.headers.update(told.headers)
        return refused
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
    response.delete_cookie(cookie_name(request), path="/console")
    return response


# ------------------------------------------------------------------------------------ changes


@router.post("/checkpoints")
async def change_checkpoint(
    request: Request,
    user: Visitor,
    _: Changing,
    path: Annotated[str, Form(max_length=1000)],
    action: Annotated[str, Form(max_length=20)],
    ttl_seconds: Annotated[int | None, Form()] = None,
) -> Response:
    """Publish, unpublish, delete or keep for a while one checkpoint of the visitor's own."""
    shelf = service_of(request).shelf
    parsed = parse_path(path)
    found = await shelf.owned(parsed, user)
    if action == "delete":
        await shelf.delete(found)
    elif action in ("publish", "unpublish"):
        await shelf.set_public(found, action == "publish")
    elif action == "ttl":
        await shelf.set_ttl(found, ttl_seconds or None)
    else:
        raise ApiError(400, f"No action {action!r}; use publish, unpublish, ttl or delete.")
    return RedirectResponse(f"/console/runs/{parsed.run_id}", status_code=303)


@router.get("/download")
async def download(
    request: Request, user: Visitor, path: Annotated[str, Query(max_length=1000)]
) -> Response:
    """A checkpoint of the visitor's own as a tar."""
    shelf = service_of(request).shelf
    found = await shelf.owned(parse_path(path), user)
    folder = await shelf.at_hand(found.folder)
    return await asyncio.to_thread(archive, request, folder, f"{found.name}.tar")


@router.post("/agreement")
async def agree(
    request: Request,
    user: Visitor,
    _: Changing,
    run: Annotated[str, Form(max_length=200)],
    keep: Annotated[bool, Form()] = False,
) -> Response:
    """Have one's answers kept for a while, or no longer, which drops what is kept."""
    await source_of(request).check(user, run)
    service_of(request).rollouts.agree(user.user_id, keep)
    return RedirectResponse(f"/console/runs/{run}/rollouts", status_code=303)


@router.post("/tags")
async def set_tags(
    request: Request,
    user: Visitor,
    _: Changing,
    run: Annotated[str, Form(max_length=200)],
    tags: Annotated[str, Form(max_length=2000)] = "",
) -> Response:
    """Give the session of a run other tags, commas between them."""
    found = list(dict.fromkeys(tag.strip()[:MAX_TAG] for tag in tags.split(",") if tag.strip()))
    if len(found) > MAX_TAGS:
        raise ApiError(400, f"A run has at most {MAX_TAGS} tags, got {len(found)}.")
    await source_of(request).check(user, run)
    store = service_of(request).store
    model = await store.call(store.models.get, run)
    assert model is not None
    await store.call(store.sessions.set_tags, model.session_id, found)
    return RedirectResponse(f"/console/runs/{run}", status_code=303)
