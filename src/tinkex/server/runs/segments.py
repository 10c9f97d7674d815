"""A run that was resumed, as one: the curves of its segments joined, and its checkpoints.

A later segment counts: what an earlier one did after the step from which the later went on was
lost, and is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tinkex.server.runs.curves import MEASURED, Course, Curve, LiveCurves
from tinkex.store import Checkpoint, Model, Store

MAX_SEGMENTS = 1000
"""Segments of one run whose curves are shown, the last ones."""
MAX_JOINED = 1_000_000
"""Points of all their curves together; more are thinned."""


async def curves_of(store: Store, curves: LiveCurves, model: Model) -> dict[str, Curve]:
    """Every curve of the run that a model is the last segment of."""
    if model.first_run_id is None:
        return await curves.of_run(model.model_id)
    segments = (await store.call(store.models.segments, model))[-MAX_SEGMENTS:]
    parts: list[dict[str, Curve]] = []
    every = num_points = 1
    for segment in segments:
        own = await curves.of_run(segment.model_id)
        parts.append({name: _thinned(curve, every) for name, curve in own.items()})
        num_points += sum(len(curve.steps) for curve in parts[-1].values())
        while num_points > MAX_JOINED:
            every, num_points = 2 * every, num_points // 2
            parts = [{name: _thinned(c, 2) for name, c in part.items()} for part in parts]
    return await asyncio.to_thread(joined, segments, parts)


def _thinned(curve: Curve, every: int) -> Curve:
    """Every so many points of a curve, the last one among them; never the curve itself."""
    chosen = slice((len(curve.steps) - 1) % every if curve.steps else 0, None, every)
    return replace(
        curve,
        stride=curve.stride * every,
        steps=curve.steps[chosen],
        values=curve.values[chosen],
        moments=curve.moments[chosen],
    )


async def courses_of(
    store: Store, curves: LiveCurves, models: Sequence[Model], names: Sequence[str]
) -> dict[tuple[str, str], Course]:
    """Some curves of many runs in short, by the ids of their last segments."""
    courses = await curves.of_runs([model.model_id for model in models], names)
    resumed = {model.model_id: model.first_run_id for model in models if model.first_run_id}
    if not resumed:
        return courses
    segments = await store.call(store.models.segments_of_runs, list(resumed.values()))
    run_ids = [segment.model_id for parts in segments.values() for segment in parts]
    by_segment = await curves.some_of_runs(run_ids, names)
    for run_id, first_run_id in resumed.items():
        parts = segments[first_run_id]
        whole = joined(parts, [by_segment.get(segment.model_id, {}) for segment in parts])
        courses |= {(run_id, name): curve.course() for name, curve in whole.items()}
    return courses


def segment_ids(store: Store, models: Sequence[Model]) -> dict[str, list[str]]:
    """The ids of all segments of each run, the first one first, by the last one's id. Blocks.

    An earlier segment among `models` stands for itself.
    """
    resumed = {
        model.model_id: model.first_run_id
        for model in models
        if model.first_run_id is not None and model.continued_by is None
    }
    segments = store.models.segments_of_runs(list(resumed.values())) if resumed else {}
    ids = {run_id: [part.model_id for part in segments[first]] for run_id, first in resumed.items()}
    return {model.model_id: ids.get(model.model_id, [model.model_id]) for model in models}


def last_checkpoints(
    store: Store, ids_of_runs: Mapping[str, Sequence[str]], kind: str
) -> dict[str, Checkpoint]:
    """The newest checkpoint of a kind of each run that has one, by the keys given. Blocks."""
    every = [segment_id for ids in ids_of_runs.values() for segment_id in ids]
    last = store.checkpoints.last_of_runs(every, kind)
    own = {run_id: [last[i] for i in ids if i in last] for run_id, ids in ids_of_runs.items()}
    return {run_id: checkpoints[-1] for run_id, checkpoints in own.items() if checkpoints}


def joined(segments: Sequence[Model], curves: Sequence[dict[str, Curve]]) -> dict[str, Curve]:
    """Join the curves of segments, the first one first, into a curve for each name."""
    whole: dict[str, Curve] = {}
    for name in dict.fromkeys(name for own in curves for name in own):
        parts = [
            _before(own[name], _end(segments[number + 1 :], name))
            for number, own in enumerate(curves)
            if name in own
        ]
        last = parts[-1]
        whole[name] = Curve(
            stride=last.stride,
            steps=[step for part in parts for step in part.steps],
            values=[value for part in parts for value in part.values],
            moments=[moment for part in parts for moment in part.moments],
            num_made=sum(len(part.steps) for part in parts[:-1]) + last.num_made,
        )
    return {name: curve for name, curve in whole.items() if curve.steps}


def _end(later: Sequence[Model], name: str) -> float:
    """The step at which a curve ends, since a later segment goes on from there."""
    # The server numbers the first step 1, and a program's loop as a rule 0.
    measured = name in MEASURED
    starts = [
        (segment.first_step or 0) + 1 if measured else segment.continues_step or 0
        for segment in later
    ]
    return min(starts, default=float("inf"))


def _before(curve: Curve, end: float) -> Curve:
    kept = [index for index, step in enumerate(curve.steps) if step < end]
    if len(kept) == len(curve.steps):
        return curve
    return Curve(
        stride=curve.stride,
        steps=[curve.steps[index] for index in kept],
        values=[curve.values[index] for index in kept],
        moments=[curve.moments[index] for index in kept],
        num_made=len(kept),
    )
