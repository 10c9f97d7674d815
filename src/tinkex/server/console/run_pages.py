"""Runs, a run, its rollouts, and runs over each other; and the JSON behind each of them.

The same for a server's runs and for folders: these routes ask `source_of(request)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from tinkex.server.console import source as sources
from tinkex.server.console.rollout_view import Coloring, rollout_view
from tinkex.server.console.shell import PageRoute, page
from tinkex.server.console.source import Growth, Source, source_of, told_curves
from tinkex.server.console.visitors import Visitor
from tinkex.server.http.handlers import answer
from tinkex.server.process.problems import ApiError
from tinkex.store import User

router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)
LIVE_S = 1.0
MAX_COMPARED = 12

Number = Annotated[int, Query(ge=0, le=1_000_000)]
Text = Annotated[str, Query(max_length=200)]
RunIds = Annotated[list[str], Query(default_factory=list, max_length=100)]
"""Several, or one with commas between."""


def _eyes(request: Request, user: User) -> User | None:
    """Whose runs are shown: the visitor's own; None, everybody's, for an administrator."""
    return None if request.state.is_admin else user


async def _runs(request: Request, user: User, query: sources.Query) -> dict[str, Any]:
    if query.everyone and not request.state.is_admin:
        raise ApiError(403, "The runs of others are shown to administrators.")
    found = await source_of(request).page(user, query)
    return {**found, "page": query.page}


Asked = Annotated[sources.Query, Query()]


@router.get("")
async def runs_page(request: Request, user: Visitor, query: Asked) -> Response:
    found = await _runs(request, user, query)
    return page(
        request,
        "runs.html",
        user,
        query=query,
        sorts=sources.SORTS,
        statuses=sources.STATUSES,
        **found,
    )


@router.get("/api/runs")
async def runs_json(request: Request, user: Visitor, query: Asked) -> Response:
    return answer(await _runs(request, user, query))


@router.get("/runs/{run_id}")
async def run_page(request: Request, user: Visitor, run_id: str) -> Response:
    source = source_of(request)
    found = await source.run(_eyes(request, user), run_id)
    curves = await source.curves(run_id)
    last = {name: curve.values[-1] for name, curve in sorted(curves.items()) if curve.values}
    has_rollouts = bool(await source.rollout_steps(run_id))
    return page(request, "run.html", user, run=found, last=last, has_rollouts=has_rollouts)


@router.get("/api/runs/{run_id}")
async def run_json(request: Request, user: Visitor, run_id: str) -> Response:
    source = source_of(request)
    found = await source.run(_eyes(request, user), run_id)
    return answer({**found, "curves": told_curves(await source.curves(run_id))})


@router.get("/api/runs/{run_id}/live")
async def run_live(request: Request, user: Visitor, run_id: str) -> Response:
    """Server-sent events: whatever of the curves grew, once a second."""
    source = source_of(request)
    await source.check(_eyes(request, user), run_id)
    return StreamingResponse(_growth(source, run_id), media_type="text/event-stream")


async def _growth(source: Source, run_id: str) -> AsyncIterator[bytes]:
    growth = Growth()
    before = None
    while not source.is_ending:
        grown = growth.of(await source.curves(run_id))
        told = {"curves": grown, "doing": source.doing(run_id)}
        # A line that says nothing keeps the connection known to proxies.
        yield b"data: " + orjson.dumps(told) + b"\n\n" if grown or told != before else b":\n\n"
        before = told
        await asyncio.sleep(LIVE_S)


# ------------------------------------------------------------------------------------ rollouts


@router.get("/runs/{run_id}/rollouts")
async def rollouts_page(
    request: Request,
    user: Visitor,
    run_id: str,
    step: Number | None = None,
    color: Coloring = "logprob",
) -> Response:
    found = await _rollouts(request, user, run_id, step)
    run = await source_of(request).run(user, run_id)
    view = rollout_view(found["answers"], color)
    agreement = source_of(request).agreement(user)
    return page(
        request,
        "rollouts.html",
        user,
        run=run,
        color=color,
        agreement=agreement,
        steps=found["steps"],
        step=found["step"],
        before=max((one for one in found["steps"] if one < found["step"]), default=None),
        after=min((one for one in found["steps"] if one > found["step"]), default=None),
        **view,
    )


@router.get("/api/runs/{run_id}/rollouts")
async def rollouts_json(
    request: Request, user: Visitor, run_id: str, step: Number | None = None
) -> Response:
    return answer(await _rollouts(request, user, run_id, step))


async def _rollouts(request: Request, user: User, run_id: str, step: int | None) -> dict[str, Any]:
    """Answers of a step; of the last one where none is named."""
    source = source_of(request)
    await source.check(user, run_id)
    steps = await source.rollout_steps(run_id)
    chosen = step if step is not None else (steps[-1] if steps else 0)
    answers = await source.rollouts(run_id, chosen) if chosen in steps else []
    return {"steps": steps, "step": chosen, "answers": answers}


# ------------------------------------------------------------------------------------ compare


@router.get("/compare")
async def compare_page(
    request: Request, user: Visitor, runs: RunIds, baseline: Text = ""
) -> Response:
    found = await _compared(request, user, runs, baseline)
    names = sorted({name for one in found for name in one["settings"]})
    rows = [(name, [one["settings"].get(name) for one in found]) for name in names]
    differing = [(name, values) for name, values in rows if len({str(v) for v in values}) > 1]
    ids = ",".join(one["run_id"] for one in found)
    return page(
        request,
        "compare.html",
        user,
        runs=found,
        ids=ids,
        differing=differing,
        baseline=baseline if any(one["run_id"] == baseline for one in found) else "",
    )


@router.get("/api/compare")
async def compare_json(
    request: Request, user: Visitor, runs: RunIds, baseline: Text = ""
) -> Response:
    found = await _compared(request, user, runs, baseline)
    for one in found:
        one["curves"] = told_curves(await source_of(request).curves(one["run_id"]))
    return answer({"runs": found, "baseline": baseline})


async def _compared(
    request: Request, user: User, runs: list[str], baseline: str
) -> list[dict[str, Any]]:
    """The runs in the order given, the baseline first."""
    given = ",".join(runs)[:5000].split(",")
    ids = list(dict.fromkeys(run_id for run_id in given if run_id))[:MAX_COMPARED]
    if baseline in ids:
        ids = [baseline, *(one for one in ids if one != baseline)]
    return [await source_of(request).run(_eyes(request, user), one) for one in ids]
