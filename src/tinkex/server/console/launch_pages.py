"""Start, watch and stop commands from the browser: recipes, exports, and what they print.

Where the visitor may start nothing, because others use this server too, the pages show the command.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from tinkex.server.console.command_line import arguments, line
from tinkex.server.console.launcher import Forms, Launcher
from tinkex.server.console.resumption import (
    folder_of_run,
    is_resumable,
    resume_arguments,
    rollouts_of_run,
)
from tinkex.server.console.shell import PageRoute, page
from tinkex.server.console.source import age, console_of, source_of
from tinkex.server.console.visitors import (
    Changing,
    Visitor,
    form_values,
    leave_cookie,
    may_start,
    owner_cookie,
)
from tinkex.server.http import inputs
from tinkex.server.http.dependencies import dependencies_of
from tinkex.server.http.handlers import answer
from tinkex.server.process.owner import is_owner
from tinkex.server.process.problems import ApiError

router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)
forms = Forms()
EXPORT = "export"
_FIRST = ("name", "model", "start", "teacher", "prompts", "output", "form")
"""Fields that people fill in; the others have good defaults and are folded."""
_EXAMPLES = {"data": "data.jsonl", "reward": "reward.py:reward", "output": "my-adapter"}
"""What to fill in, where there is no default and the name of the field says little."""
_TITLES = {
    "sft": "Supervised fine-tuning",
    "dpo": "Preference optimization",
    "rl": "Reinforcement learning",
    "distill": "Distillation",
    EXPORT: "Export a checkpoint",
}
_ENDED = ("finished", "stopped", "failed", "lost")
_REFUSED = (
    "Commands are started from the browser only by the person who runs this server, on their own "
    "machine: open the link that `tinkex console` prints. Elsewhere, type the command."
)


def _launcher(request: Request) -> Launcher:
    launcher = console_of(request).launcher
    if launcher is None or not may_start(request):
        raise ApiError(403, _REFUSED)
    return launcher


def _base_url(request: Request) -> str:
    """This server, for programs on this machine; a console of folders leaves it to the program."""
    if source_of(request).is_local:
        return ""
    host, port = request.scope["server"][:2]
    scheme = "https" if dependencies_of(request).config.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@router.get("/owner")
async def enter_as_owner(
    request: Request, token: Annotated[str, Query(max_length=200)]
) -> Response:
    """Remember that this browser has the owner's token; `tinkex console` makes the link."""
    response = RedirectResponse("/console", status_code=303)
    if is_owner(token):
        leave_cookie(request, response, token, max_age_s=None, name=owner_cookie(request))
    return response


@router.get("/start")
async def start_page(request: Request, user: Visitor) -> Response:
    recipes = {name: form for name, form in (await forms.all()).items() if name != EXPORT}
    facts = {"recipes": recipes, "titles": _TITLES, **_launches(request)}
    return page(request, "start.html", user, **facts)


def _launches(request: Request) -> dict[str, Any]:
    if not may_start(request):
        return {"may_start": False, "launches": []}
    launches = [
        {**launch.facts(), "age": age(launch.started_at)} for launch in _launcher(request).launches
    ]
    return {"may_start": True, "launches": launches}


@router.get("/start/{name}")
async def form_page(request: Request, user: Visitor, name: inputs.Text) -> Response:
    return await _form_page(request, user, name, dict(request.query_params))


async def _form_page(
    request: Request, user: Visitor, name: str, values: dict[str, str], message: str = ""
) -> Response:
    form = await forms.of(name)
    fields = [field for field in form["fields"] if field["kind"] != "flag" or name == EXPORT]
    first = [f for f in fields if f["flag"] is None or f["is_required"] or f["name"] in _FIRST]
    launcher = console_of(request).launcher
    return page(
        request,
        "form.html",
        user,
        400 if message else 200,
        recipe=name,
        title=_TITLES.get(name, name),
        form=form,
        first=first,
        others=[field for field in fields if field not in first],
        values=values,
        examples=_EXAMPLES,
        message=message,
        may_start=may_start(request),
        folder=str(launcher.folder) if launcher is not None else "",
        models=await source_of(request).base_models(),
    )


async def _argv(request: Request, name: str, *more: str) -> list[str]:
    """The arguments of `tinkex` that a form asks for, with `more` options."""
    form = await forms.of(name)
    given = await form_values(request)
    return [*([] if name == EXPORT else ["train"]), name, *arguments(form, given, *more)]


@router.post("/start/{name}")
async def start(request: Request, user: Visitor, _: Changing, name: inputs.Text) -> Response:
    """Start a recipe or an export, or say why not."""
    launcher = _launcher(request)
    try:
        launch = await launcher.start(await _argv(request, name), _base_url(request))
    except ApiError as exc:
        return await _form_page(request, user, name, await form_values(request), str(exc))
    return RedirectResponse(f"/console/launches/{launch.launch_id}", status_code=303)


@router.post("/api/start/{name}/command")
async def command(request: Request, user: Visitor, _: Changing, name: inputs.Text) -> Response:
    """The command of a form, to type it oneself; `missing` says what it lacks yet."""
    server = []
    if not source_of(request).is_local and not may_start(request):
        server = [f"--base-url={str(request.base_url).rstrip('/')}"]
    try:
        return answer({"command": line(await _argv(request, name, *server))})
    except ApiError as exc:
        return answer({"command": "", "missing": str(exc)})


async def resumable_folder(request: Request, run: dict[str, Any]) -> Path | None:
    """The log folder from which this visitor can resume a run with a click, or None."""
    launcher = console_of(request).launcher
    if launcher is None or not may_start(request) or run["status"] not in _ENDED:
        return None
    if "folder" in run:
        folder = Path(run["folder"]).resolve()
        return folder if await asyncio.to_thread(is_resumable, folder) else None
    log_dir, run_ids = run["settings"].get("log_dir"), run["segments"]
    return await asyncio.to_thread(folder_of_run, log_dir, run_ids, launcher.folder)


async def rollouts_folder(request: Request, run: dict[str, Any]) -> Path | None:
    """The log folder with the answers of a server's run, for whom the server runs; or None."""
    launcher = console_of(request).launcher
    if launcher is None or source_of(request).is_local or not may_start(request):
        return None
    log_dir, run_ids = run["settings"].get("log_dir"), run["segments"]
    return await asyncio.to_thread(rollouts_of_run, log_dir, run_ids, launcher.folder)


@router.post("/runs/{run_id}/resume")
async def resume_run(request: Request, user: Visitor, _: Changing, run_id: inputs.Text) -> Response:
    """Resume a run of `tinkex train` from its log folder on this machine."""
    launcher = _launcher(request)
    folder = await resumable_folder(request, await source_of(request).run(user, run_id))
    if folder is None:
        raise ApiError(
            400,
            "This run cannot be resumed from here: it still runs, has trained to its end, saved no "
            "checkpoint, or has no log folder of yours on this machine.",
        )
    launch = await launcher.start(resume_arguments(folder), _base_url(request))
    return RedirectResponse(f"/console/launches/{launch.launch_id}", status_code=303)


@router.get("/launches/{launch_id}")
async def launch_page(request: Request, user: Visitor, launch_id: inputs.Text) -> Response:
    launch = _launcher(request).get(launch_id)
    return page(request, "launch.html", user, launch=launch.facts(), age=age(launch.started_at))


@router.get("/api/launches/{launch_id}")
async def launch_json(request: Request, user: Visitor, launch_id: inputs.Text) -> Response:
    return answer(_launcher(request).get(launch_id).facts())


@router.post("/launches/{launch_id}")
async def change_launch(
    request: Request,
    user: Visitor,
    _: Changing,
    launch_id: inputs.Text,
    action: Annotated[str, Form(max_length=20)],
) -> Response:
    """Stop a command, or give the same one again, which resumes a run from its last checkpoint."""
    launcher = _launcher(request)
    launch = launcher.get(launch_id)
    if action == "stop":
        launcher.stop(launch)
    elif action == "again" and launch.status != "running":
        launch = await launcher.start(launch.argv, _base_url(request))
    else:
        raise ApiError(400, f"No action {action!r} now; use stop, or again when it has ended.")
    return RedirectResponse(f"/console/launches/{launch.launch_id}", status_code=303)
