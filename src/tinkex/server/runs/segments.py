"""A run that was resumed, as one: the curves of its segments joined, and its checkpoints.

A later segment counts: what an earlier one did after the step from which the later went on was
lost, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.server.runs.curves import MEASURED, Course, Curve, LiveCurves
from tinkex.store import Model, Store


async def curves_of(store: Store, curves: LiveCurves, model: Model) -> dict[str, Curve]:
    """Every curve of the run that a model is the last segment of."""
    if model.first_run_id is None:
        return await curves.of_run(model.model_id)
    segments = await store.call(store.models.segments, model)
    return joined(segments, [await curves.of_run(one.model_id) for one in segments])


async def courses_of(
    store: Store, curves: LiveCurves, models: Sequence[Model], names: Sequence[str]
) -> dict[tuple[str, str], Course]:
    """Some curves of many runs in short, by the ids of their last segments."""
    courses = await curves.of_runs([model.model_id for model in models], names)
    resumed = {model.model_id: model.first_run_id for model in models if model.first_run_id}
    if not resumed:
        return courses
    segments = await store.call(store.models.segments_of_runs, list(resumed.values()))
    run_ids = [one.model_id for parts in segments.values() for one in parts]
    found = await curves.some_of_runs(run_ids, names)
    for run_id, first_run_id in resumed.items():
        parts = segments[first_run_id]
        whole = joined(parts, [found.get(one.model_id, {}) for one in parts])
        courses |= {(run_id, name): curve.course() for name, curve in whole.items()}
    return courses


def joined(segments: Sequence[Model], curves: Sequence[dict[str, Curve]]) -> dict[str, Curve]:
    """Join the curves of segments, the first one first, into a curve for each name."""
    whole: dict[str, Curve] = {}
    for name in dict.fromkeys(name for one in curves for name in one):
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
            moments=[at for part in parts for at in part.moments],
            num_made=sum(len(part.steps) for part in parts[:-1]) + last.num_made,
        )
    return {name: curve for name, curve in whole.items() if curve.steps}


def _end(later: Sequence[Model], name: str) -> float:
    """The step at which a curve ends, since a later segment goes on from there."""
    # The server numbers the first step 1, and a program's loop as a rule 0.
    measured = name in MEASURED
    starts = [(one.first_step or 0) + 1 if measured else one.continues_step or 0 for one in later]
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
