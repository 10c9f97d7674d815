"""The pages of a server that change something: its door, checkpoints, tags, what is kept."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from tinkex.errors import InvalidInputError
from tinkex.server.console.shell import PageRoute, back_of, confirmation, page
from tinkex.server.console.source import SETTINGS_PAGE, console_of, file_stem
from tinkex.server.console.visitors import Changing, Visitor, log_in, log_out, put_off
from tinkex.server.files.checkpoints import parse_path
from tinkex.server.guard.auth import is_token
from tinkex.server.http import inputs
from tinkex.server.http.dependencies import service_of
from tinkex.server.process.problems import ApiError
from tinkex.server.rest.files import archive, session_trace
from tinkex.server.runs.descriptions import describe
from tinkex.server.service.run_deletion import delete_run
from tinkex.types.fields.bounds import text
from tinkex.types.service.extensions import DescribeRunRequest

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
        message = str(told).removesuffix(" Check TINKER_API_KEY.")  # in a browser there is none
        refused = page(request, "login.html", None, told.status, message=message)
        refused.headers.update(told.headers)
        return refused
    return response


@router.get("/enter")
async def enter(request: Request, token: Annotated[str, Query(max_length=4000)]) -> Response:
    """Log in by a link with a token that ends within the hour; `tinkex console` makes one."""
    if not is_token(token):  # an address is kept by browsers and written to logs
        raise ApiError(401, "A link holds a token, never a key. Log in with the key, or make one.")
    response = RedirectResponse("/console", status_code=303)
    await log_in(request, response, token)
    return response


@router.post("/logout")
async def logout(request: Request, user: Visitor, _: Changing) -> Response:
    response = RedirectResponse("/console/login", status_code=303)
    await log_out(request, response)
    return response


# ------------------------------------------------------------------------------------ changes

Confirmed = Annotated[Literal["", "yes"], Form()]
"""Whether the visitor said yes already; browsers without scripts are asked by a page."""


@router.post("/checkpoints")
async def change_checkpoint(
    request: Request,
    user: Visitor,
    _: Changing,
    path: Annotated[str, Form(max_length=1000)],
    action: Annotated[str, Form(max_length=20)],
    ttl_seconds: Annotated[int | None, Form(ge=0, le=2**31 - 1)] = None,
    confirmed: Confirmed = "",
) -> Response:
    """Publish, unpublish, delete or keep for a while one checkpoint of the visitor's own."""
    shelf = service_of(request).shelf
    parsed = parse_path(path)
    stored = await shelf.owned(parsed, user)
    if action == "delete" and not confirmed:
        detail = f"{path} is deleted for good."
        values = [("path", path), ("action", action)]
        return confirmation(
            request, user, f"Delete the checkpoint {stored.name}?", detail, "Delete", values
        )
    if action == "delete":
        _make_way(request)
        await shelf.delete(stored)
    elif action in ("publish", "unpublish"):
        await shelf.set_public(stored, action == "publish")
    elif action == "ttl":
        if ttl_seconds is not None:  # the choice that says how it is now has no value
            await shelf.set_ttl(stored, ttl_seconds or None)
    else:
        raise ApiError(400, f"No action {action!r}; use publish, unpublish, ttl or delete.")
    return RedirectResponse(f"/console/runs/{parsed.run_id}", status_code=303)


def _make_way(request: Request) -> None:
    """On a full disk, a deletion may use what is kept for it, as at the API."""
    service_of(request).room.make_way(is_admin=request.state.is_admin)


@router.post("/runs/delete")
async def delete_runs(
    request: Request,
    user: Visitor,
    _: Changing,
    runs: Annotated[list[Annotated[str, text(200)]], Form(max_length=SETTINGS_PAGE)],
    confirmed: Confirmed = "",
) -> Response:
    """Delete runs of the visitor's own for good; those that cannot go are named."""
    chosen = [await console_of(request).source.run(user, run_id) for run_id in dict.fromkeys(runs)]
    if not confirmed:
        names = ", ".join(run["name"] for run in chosen)
        question = f"Delete {len(chosen)} run{'s' if len(chosen) != 1 else ''}?"
        detail = f"Checkpoints, curves and state are deleted for good: {names}"
        values = [("runs", run["run_id"]) for run in chosen]
        return confirmation(request, user, question, detail, "Delete", values)
    service = service_of(request)
    _make_way(request)
    refusals = []
    for run in chosen:
        model = await service.store.call(service.store.models.get, run["run_id"])
        try:
            if model is not None:
                await delete_run(service, model, {})
        except (ApiError, InvalidInputError) as exc:
            refusals.append(str(exc))
    if refusals:
        deleted = f"{len(chosen) - len(refusals)} of {len(chosen)} runs were deleted. "
        raise ApiError(400, (deleted if len(chosen) > 1 else "") + " ".join(refusals))
    back = back_of(request)  # the list as it was filtered; the page of the run is gone
    is_list = back.partition("?")[0] == "/console"
    return RedirectResponse(back if is_list else "/console", status_code=303)


@router.get("/download")
async def download(
    request: Request, user: Visitor, path: Annotated[str, Query(max_length=1000)]
) -> Response:
    """A checkpoint of the visitor's own as a tar."""
    shelf = service_of(request).shelf
    found = await shelf.owned(parse_path(path), user)
    folder = await shelf.at_hand(found.folder)
    return await asyncio.to_thread(archive, request, folder, f"{found.name}.tar")


@router.get("/runs/{run_id}/trace")
async def trace(request: Request, user: Visitor, run_id: inputs.Text) -> Response:
    """The timeline of a run of the visitor's own, for ui.perfetto.dev."""
    shown = await console_of(request).source.run(user, run_id)
    service = service_of(request)
    model = await service.store.call(service.store.models.get, shown["run_id"])
    assert model is not None
    content = await session_trace(service, model.session_id, model.model_id)
    headers = {"Content-Disposition": f'attachment; filename="{file_stem(shown["name"])}.pftrace"'}
    return Response(content, headers=headers, media_type="application/octet-stream")


@router.post("/agreement")
async def agree(
    request: Request,
    user: Visitor,
    _: Changing,
    run: Annotated[str, Form(max_length=200)],
    keep: Annotated[bool, Form()] = False,
) -> Response:
    """Have one's answers kept for a while, or no longer, which drops what is kept."""
    await console_of(request).source.check(user, run)
    service_of(request).rollouts.agree(user.user_id, keep)
    return RedirectResponse(f"/console/runs/{run}/rollouts", status_code=303)


@router.post("/describe")
async def describe_run(
    request: Request,
    user: Visitor,
    _: Changing,
    run: Annotated[str, Form(max_length=200)],
    name: Annotated[str, Form(max_length=1000)] = "",
    note: Annotated[str, Form(max_length=20_000)] = "",
    tags: Annotated[str, Form(max_length=10_000)] = "",
) -> Response:
    """Rename a run of the visitor's own, note and tag it. Tags are separated by commas.

    A name and tags that are sent back as they were shown stay what they were: those of the run's
    session do not become its own.
    """
    shown = await console_of(request).source.run(user, run)
    service = service_of(request)
    service.room.require()
    model = await service.store.call(service.store.models.get, shown["run_id"])
    assert model is not None
    asked = DescribeRunRequest(
        name=None if name.strip() == shown["name"] else name.strip(),
        note=note.strip(),
        tags=None if _tags(tags) == _tags(",".join(shown["tags"])) else _tags(tags),
    )
    await describe(service.store, service.curves, model, asked)
    return RedirectResponse(f"/console/runs/{run}", status_code=303)


def _tags(text: str) -> list[str]:
    return list(dict.fromkeys(tag.strip() for tag in text.split(",") if tag.strip()))
