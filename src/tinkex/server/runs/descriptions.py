"""What a run is called, what its program was started with, and which run it goes on from.

A run that is resumed has several segments: a model on the server each, made from a checkpoint of
the one before. The last one stands for the run. Names and tags of a run are those its user gave
it, else those of its session. Knows rows and rules, not HTTP.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tinkex.errors import InvalidInputError
from tinkex.server.process.problems import ApiError
from tinkex.server.runs.curves import LiveCurves
from tinkex.store import Model, Session, Store
from tinkex.types.account.checkpoints import TinkerPath
from tinkex.types.service.extensions import Continuation, DescribeRunRequest

MAX_SETTINGS = 256
MAX_SETTINGS_BYTES = 32 * 1024
"""Of all settings of a run together, as JSON: they are read with every page that shows the run."""
NEAR_AMONG, NEAR_LENGTH = 200, 64
"""The most names that an unknown name is compared with, and the characters of each."""


def given_name(metadata: Mapping[str, Any] | None) -> str | None:
    """The name in the metadata that a client made a run with, where it can be one.

    Official clients have no other way to name a run.
    """
    name = (metadata or {}).get("name")
    if not isinstance(name, str) or not name:
        return None
    try:
        return DescribeRunRequest(name=name).name
    except InvalidInputError:
        return None  # it stays metadata


def name_of(model: Model, session: Session | None) -> str | None:
    """The name of a run: its own, else that of its session."""
    return model.name or (session.display_name if session else None) or None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A sentence with up to three known names that look like a name, or nothing. Blocks.

    Comparing two names can take the product of their lengths, and a user may have ten thousand.
    """
    whole = {each[:NEAR_LENGTH]: each for each in reversed(known[:NEAR_AMONG])}
    found = difflib.get_close_matches(name[:NEAR_LENGTH], list(whole), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(whole[each]) for each in found)}?" if found else ""


def tags_of(model: Model, session: Session | None) -> list[str]:
    """The tags of a run: its own, else those of its session."""
    return list((session.tags if session else []) if model.tags is None else model.tags)


async def describe(
    store: Store, curves: LiveCurves, model: Model, asked: DescribeRunRequest
) -> Model:
    """Keep what a user says of a run of theirs. A repeat changes nothing.

    Raises:
        InvalidInputError: It would have too many settings, or `continues` cannot be.
    """
    if asked.continues is not None:
        await _continue(store, curves, model, asked.continues)

    def change(now: Model) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if asked.name is not None:
            values["name"] = asked.name or None
        if asked.note is not None:
            values["note"] = asked.note or None
        if asked.tags is not None:
            values["tags"] = list(dict.fromkeys(asked.tags))
        if asked.settings:
            values["settings"] = _within_bounds({**(now.settings or {}), **asked.settings})
        return values

    return await store.call(store.models.revise, model.model_id, change)


def _within_bounds(settings: dict[str, Any]) -> dict[str, Any]:
    if len(settings) > MAX_SETTINGS:
        raise InvalidInputError(
            f"a run has at most {MAX_SETTINGS} settings, this would be {len(settings)}; put those "
            "that belong together into one",
            path="settings",
        )
    if (size := len(orjson.dumps(settings))) > MAX_SETTINGS_BYTES:
        raise InvalidInputError(
            f"settings of a run take at most {MAX_SETTINGS_BYTES} bytes as JSON, these {size}; "
            "give the name of a file instead of what is in it",
            path="settings",
        )
    return settings


async def _continue(store: Store, curves: LiveCurves, model: Model, wanted: Continuation) -> None:
    if model.continues == wanted.run_id and model.continues_step == wanted.step:
        return
    before = await store.call(store.models.get, wanted.run_id)
    if before is None or before.user_id != model.user_id:
        text = f"No training run {wanted.run_id!r} of yours. List them with GET /training_runs."
        raise ApiError(404, text, listing="training_runs")
    if model.continues is not None or model.continued_by is not None:
        raise InvalidInputError(
            f"{model.model_id} is a segment of another run already", path="continues"
        )
    first = before.first_segment_id
    if first == model.model_id:
        raise InvalidInputError("a run cannot go on from itself", path="continues")
    step = await _steps_before(store, model, first, wanted.step)
    values = {"continues_step": wanted.step, "first_step": step}
    await store.call(store.models.continue_run, model.model_id, before.model_id, values)
    await curves.begin_at(model.model_id, step)


async def _steps_before(store: Store, model: Model, first: str, step: int) -> int:
    """Optimizer steps before the segment: those of the checkpoint it was made from.

    The program's own count may be another one, where a step of it has several updates.
    """
    if model.made_from is None:
        return step
    made_from = await store.call(store.checkpoints.get, model.made_from)
    if made_from is None or made_from.num_steps is None:
        return step
    run = await store.call(store.models.get, TinkerPath.parse(made_from.path).run_id)
    is_of_run = run is not None and run.first_segment_id == first
    return made_from.num_steps if is_of_run else step
