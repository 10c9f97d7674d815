"""Runs, a run, its rollouts, and runs over each other; and the JSON behind each of them.

The same for a server's runs and for folders: these routes ask `source_of(request)`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from tinkex.server.console import source as sources
from tinkex.server.console.colors import colors_of
from tinkex.server.console.command_line import line
from tinkex.server.console.folder_runs import Folder
from tinkex.server.console.launch_pages import resumable_folder, rollouts_folder
from tinkex.server.console.metric_files import MEDIA, Kind, metric_file
from tinkex.server.console.resumption import resume_arguments
from tinkex.server.console.rollout_view import Coloring, rollout_view
from tinkex.server.console.settings_view import settings_view, shown, sort_runs
from tinkex.server.console.shell import PageRoute, page
from tinkex.server.console.source import (
    MAX_SENT,
    Growth,
    Source,
    console_of,
    copied,
    file_stem,
    source_of,
    thinned_curves,
)
from tinkex.server.console.visitors import Visitor, begin_stream, may_look_on
from tinkex.server.fairness.line import take_from
from tinkex.server.guard.auth import USER_ID
from tinkex.server.http import inputs
from tinkex.server.http.handlers import answer
from tinkex.server.process.problems import ApiError
from tinkex.store import User

router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)
LIVE_S = 1.0
MAX_LIVE = 16
"""Runs that a visitor may look on at a time; browsers hold six connections to a host."""
REST = 50
"""A stream rests so many times as long as its last look took, or `LIVE_S`."""
LONGEST_REST_S = 30.0
MAX_COMPARED = 12

Number = Annotated[int, Query(ge=0, le=1_000_000)]
Text = Annotated[str, Query(max_length=200)]
RunIds = Annotated[list[inputs.Text], Query(default_factory=list, max_length=sources.SETTINGS_PAGE)]
"""Several, or one text with several ids separated by commas."""


MetricNames = Annotated[list[Text], Query(default_factory=list, max_length=50)]


def _run_ids(runs: list[str]) -> list[str]:
    return _all_run_ids(runs)[:MAX_COMPARED]


def _all_run_ids(runs: list[str]) -> list[str]:
    ids = ",".join(runs)[:20_000].split(",")
    return list(dict.fromkeys(run_id for run_id in ids if run_id))


def _eyes(request: Request, user: User) -> User | None:
    """Whose runs are shown: the visitor's own; None, everybody's, for an administrator."""
    return None if request.state.is_admin else user


async def _runs(request: Request, user: User, query: sources.Query) -> dict[str, Any]:
    if query.everyone and not request.state.is_admin:
        raise ApiError(403, "The runs of others are shown to administrators.")
    source = source_of(request)
    if query.view == "folders" and not source.has_folders:
        query = query.model_copy(update={"view": ""})
    listing = await source.page(user, query)
    return {**listing, "page": query.page, "query": query}


Asked = Annotated[sources.Query, Query()]


@router.get("")
async def runs_page(request: Request, user: Visitor, query: Asked) -> Response:
    listing = await _runs(request, user, query)
    query = listing["query"]
    if query.view == "settings":
        listing["runs"] = sort_runs(listing["runs"], query.by, down=query.down)
        listing["settings"] = await asyncio.to_thread(settings_view, listing["runs"])
    return page(
        request,
        "settings.html" if query.view == "settings" else "runs.html",
        user,
        has_folders=source_of(request).has_folders,
        sorts=sources.SORTS,
        statuses=sources.STATUSES,
        **listing,
    )


@router.get("/api/runs")
async def runs_json(request: Request, user: Visitor, query: Asked) -> Response:
    listing = await _runs(request, user, query)
    return answer({name: value for name, value in listing.items() if name != "query"})


@router.get("/runs/{run_id}")
async def run_page(request: Request, user: Visitor, run_id: inputs.Text) -> Response:
    source = source_of(request)
    run = await source.run(_eyes(request, user), run_id)
    curves = await source.curves(run_id)
    last = {name: curve.values[-1] for name, curve in sorted(curves.items()) if curve.values}
    settings = [(name, shown(value)) for name, value in run["settings"].items()]
    facts = {**_head_facts(user, run), **await _resuming(request, run)}
    return page(request, "run.html", user, last=last, settings=settings, **facts)


def _head_facts(user: User, run: dict[str, Any]) -> dict[str, Any]:
    """The facts of `run_head.html`, which all pages of a run begin with."""
    is_mine = "folder" not in run and run["owner"] == user.user_id
    return {"run": run, "is_mine": is_mine}


async def _resuming(request: Request, run: dict[str, Any]) -> dict[str, Any]:
    """The command that resumes a run of a recipe, and whether this visitor may start it here."""
    if (folder := await resumable_folder(request, run)) is not None:
        return {"resume_command": line(resume_arguments(folder)), "may_resume": True}
    log_dir = run["settings"].get("log_dir")
    is_elsewhere = "folder" not in run and isinstance(log_dir, str) and run["resume"]
    command = line(resume_arguments(log_dir)) if is_elsewhere else ""
    return {"resume_command": command, "may_resume": False}


@router.get("/api/runs/{run_id}")
async def run_json(request: Request, user: Visitor, run_id: inputs.Text) -> Response:
    run = await source_of(request).run(_eyes(request, user), run_id)
    return answer({**run, "curves": (await _drawn(request, [run_id]))[run_id]})


@router.get("/runs/{run_id}/metrics.{kind}")
async def metrics_file(
    request: Request, user: Visitor, run_id: inputs.Text, kind: Kind
) -> Response:
    """All curves of a run to download."""
    source = source_of(request)
    found = await source.run(_eyes(request, user), run_id)
    async with _turn(request):
        curves = {name: copied(curve) for name, curve in (await source.curves(run_id)).items()}
        # Whole: what makes the pieces takes several times their size, for as long as they are read.
        content = await asyncio.to_thread(lambda: b"".join(metric_file(curves, kind)))
    name = f"{file_stem(found['name'])}.{kind}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, headers=headers, media_type=MEDIA[kind])


@router.get("/api/curves")
async def curves_json(
    request: Request, user: Visitor, runs: RunIds, names: MetricNames
) -> Response:
    """Curves of several runs; of all metrics thinned, of one that is named every point."""
    ids = _run_ids(runs)
    for run_id in ids:
        await source_of(request).check(_eyes(request, user), run_id)
    return answer(await _drawn(request, ids, names))


def _turn(request: Request) -> AbstractAsyncContextManager[None]:
    """A turn at what is made of very many points."""
    return console_of(request).drawing.slot(request.scope.get(USER_ID, ""))


async def _drawn(
    request: Request, run_ids: list[str], names: list[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Curves by run and name, together no more points than a page is sent.

    A run after the other: each may have half a million points, of which few are kept.
    """
    most, drawn = MAX_SENT // max(len(run_ids), 1), {}
    async with _turn(request):
        for run_id in run_ids:
            curves = await source_of(request).curves(run_id)
            chosen = {name: curve for name, curve in curves.items() if not names or name in names}
            drawn[run_id] = thinned_curves(chosen, most)
    return drawn


@router.get("/api/runs/{run_id}/live")
async def run_live(request: Request, user: Visitor, run_id: inputs.Text) -> Response:
    """Server-sent events: whatever of the curves grew, once a second."""
    source = source_of(request)
    await source.check(_eyes(request, user), run_id)
    watching = console_of(request).watching
    if watching[user.user_id] >= MAX_LIVE:
        text = f"You look on at {MAX_LIVE} runs already; close some of their pages."
        raise ApiError(429, text, code="quota", headers={"Retry-After": "10"})
    begin_stream(request)
    growth = _growth(request, source, run_id, user.user_id)
    return StreamingResponse(growth, media_type="text/event-stream")


async def _growth(
    request: Request, source: Source, run_id: str, user_id: str
) -> AsyncIterator[bytes]:
    watching, growth = console_of(request).watching, Growth()
    before = None
    if watching[user_id] >= MAX_LIVE:  # many began at once
        return
    watching[user_id] += 1
    try:
        while not source.is_ending and await may_look_on(request):
            async with _turn(request):
                began_at = time.perf_counter()
                grown = growth.of(await source.curves(run_id))
                told = {"curves": grown, "doing": source.doing(run_id)}
                # A line that says nothing keeps the connection known to proxies.
                is_new = bool(grown) or told != before
                event = b"data: " + orjson.dumps(told) + b"\n\n" if is_new else b":\n\n"
                took_s = time.perf_counter() - began_at
            before = told
            yield event
            # A run of a million points takes a tenth of a second to look at.
            await asyncio.sleep(min(max(LIVE_S, REST * took_s), LONGEST_REST_S))
    finally:
        take_from(watching, user_id)


# ------------------------------------------------------------------------------------ rollouts


@router.get("/runs/{run_id}/rollouts")
async def rollouts_page(
    request: Request,
    user: Visitor,
    run_id: inputs.Text,
    step: Number | None = None,
    color: Coloring = "logprob",
) -> Response:
    agreement = source_of(request).agreement(user)
    async with _turn(request):
        found = await _rollouts(request, user, run_id, step)
        run = await source_of(request).run(user, run_id)

        def made() -> Response:  # of tens of thousands of coloured tokens: not on the event loop
            return page(
                request,
                "rollouts.html",
                user,
                **_head_facts(user, run),
                color=color,
                agreement=agreement,
                file=found["file"],
                steps=found["steps"],
                step=found["step"],
                before=max((one for one in found["steps"] if one < found["step"]), default=None),
                after=min((one for one in found["steps"] if one > found["step"]), default=None),
                **rollout_view(found["answers"], color),
            )

        return await asyncio.to_thread(made)


@router.get("/api/runs/{run_id}/rollouts")
async def rollouts_json(
    request: Request, user: Visitor, run_id: inputs.Text, step: Number | None = None
) -> Response:
    async with _turn(request):
        return answer(await _rollouts(request, user, run_id, step))


async def _rollouts(request: Request, user: User, run_id: str, step: int | None) -> dict[str, Any]:
    """Answers of a step; of the last one where none is named.

    Those of the run's log folder, which have rewards and stay, else those that the server keeps.
    """
    source = source_of(request)
    await source.check(user, run_id)
    path = await rollouts_folder(request, await source.run(user, run_id))
    folder = _open_folder(path) if path else None
    steps = await asyncio.to_thread(folder.rollout_steps) if folder else []
    if not steps:
        folder, steps = None, await source.rollout_steps(run_id)
    chosen = step if step is not None else (steps[-1] if steps else 0)
    answers: list[dict[str, Any]] = []
    if chosen in steps and folder is not None:
        answers = await asyncio.to_thread(folder.answers, chosen)
    elif chosen in steps:
        answers = await source.rollouts(run_id, chosen)
    return {"steps": steps, "step": chosen, "answers": answers, "file": _rollouts_file(folder)}


@functools.lru_cache(maxsize=16)
def _open_folder(path: Path) -> Folder:
    """A log folder that remembers where in its file the answers of each step are."""
    return Folder.at(path)


def _rollouts_file(folder: Folder | None) -> str | None:
    return str(folder.rollouts.file) if folder else None


# ------------------------------------------------------------------------------------ compare


@router.get("/compare")
async def compare_page(
    request: Request, user: Visitor, runs: RunIds, baseline: Text = ""
) -> Response:
    found = await _compared(request, user, runs, baseline)
    ids = [one["run_id"] for one in found]
    baseline = baseline if baseline in ids else ""
    for one, color in zip(found, colors_of(ids), strict=True):
        one["color"] = color
    drawn = [
        {
            "id": one["run_id"],
            "name": one["name"],
            "color": one["color"],
            "isBaseline": one["run_id"] == baseline,
        }
        for one in found
    ]

    def address(without: str = "", baseline: str = baseline) -> str:
        left = {"runs": ",".join(one for one in ids if one != without)}
        kept = {"baseline": baseline} if baseline and baseline != without else {}
        return f"/console/compare?{urlencode({**left, **kept})}"

    return page(
        request,
        "compare.html",
        user,
        address=address,
        runs=found,
        num_left_out=max(len(_all_run_ids(runs)) - MAX_COMPARED, 0),
        ids=",".join(ids),
        drawn=orjson.dumps(drawn).decode(),
        settings=settings_view(found, baseline),
        baseline=baseline,
    )


@router.get("/api/compare")
async def compare_json(
    request: Request, user: Visitor, runs: RunIds, baseline: Text = ""
) -> Response:
    found = await _compared(request, user, runs, baseline)
    drawn = await _drawn(request, [run["run_id"] for run in found])
    for run in found:
        run["curves"] = drawn[run["run_id"]]
    return answer({"runs": found, "baseline": baseline})


async def _compared(
    request: Request, user: User, runs: list[str], baseline: str
) -> list[dict[str, Any]]:
    """The runs in the order given, the baseline first."""
    ids = _run_ids(runs)
    if baseline in ids:
        ids = [baseline, *(one for one in ids if one != baseline)]
    return [await source_of(request).run(_eyes(request, user), one) for one in ids]
