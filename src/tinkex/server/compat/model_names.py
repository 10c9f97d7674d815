"""Which weights a model name means: a base model, a checkpoint, a name, a run.

The order is `ModelNames.target`'s, for OpenAI clients, the console and the command line alike. The
adapter named is the adapter served: a name that is none of these is refused, never answered by a
base model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinkex.errors import InvalidInputError
from tinkex.server.process.problems import ApiError
from tinkex.server.runs.descriptions import did_you_mean, name_of
from tinkex.server.runs.segments import last_checkpoints, segment_ids
from tinkex.server.service.service import Service
from tinkex.store import Checkpoint, Store, User
from tinkex.types.account.checkpoints import is_tinker_path

MAX_LISTED = 1000
MAX_KNOWN = 10_000
KNOWN_S = 1.0
MAX_SEGMENTS = 20
"""Of a run, that are asked for checkpoints in a list of all runs."""
SAMPLED_KINDS = ("sampler_weights", "weights")


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """The weights that a name stands for."""

    name: str
    """As the caller wrote it."""
    base_model: str
    model_path: str | None = None


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name in the list of models, and the checkpoint that it means."""

    name: str
    checkpoint: Checkpoint | None = None
    kind: Literal["base", "name", "run", "checkpoint"] = "base"


class ModelNames:
    """Which weights the names of each user mean.

    What was found is taken for granted for a second: the sample itself asks again whether its
    checkpoint may be read, and two questions of the database cost a short answer its latency.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[tuple[str, str], tuple[float, SampleTarget]] = {}

    async def target(self, user: User, name: str) -> SampleTarget:
        """The weights behind a name, which is the first of these that there is.

        A `tinker://` path; a name that the user gave to a checkpoint; a base model; the user's
        newest run of that name, or the run of that id, by its last checkpoint. So a base model
        stays one whatever a run is called.

        Raises:
            ApiError: 404, with what there is.
        """
        key, now = (user.user_id, name), time.monotonic()
        until, target = self._known.get(key, (0.0, None))
        if target is None or until < now:
            target = await self._find(user, name)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = (now + KNOWN_S, target)
        return target

    def forget(self, user: User, name: str) -> None:
        """The name means something else from now on."""
        self._known.pop((user.user_id, name), None)

    async def _find(self, user: User, name: str) -> SampleTarget:
        service, path = self._service, name
        base, semicolon, behind = name.partition(";")
        if semicolon and is_tinker_path(behind):
            return await self._on_base(user, name, base, behind)
        if not is_tinker_path(name):
            named = await service.store.call(service.store.names.get, user.user_id, name)
            of_run = None
            if named is None and name not in service.catalog.names:
                of_run = await self._of_run(user, name)
            if named is None and of_run is None:
                base = await self._base(user, name)
                await service.catalog.check_context(base, path="model")
                return SampleTarget(name, base)
            path = named.path if named else of_run or ""
        checkpoint = await service.shelf.readable(path, user)
        return SampleTarget(name, checkpoint.base_model, path)

    async def _of_run(self, user: User, name: str) -> str | None:
        """The last weights of a run by its name or id; None when no run is called that."""
        store = self._service.store
        run = await store.call(store.models.find, user.user_id, name)
        if run is None:
            return None
        segments = [segment.model_id for segment in await store.call(store.models.segments, run)]
        last = await store.call(_last_checkpoints, store, {run.model_id: segments})
        if (checkpoint := last.get(run.model_id)) is not None:
            return checkpoint.path
        raise ApiError(
            404,
            f"The run {name[:200]!r} has no checkpoint yet. Let it train to its first one.",
            code="model_not_found",
            path="model",
        )

    async def _base(self, user: User, name: str) -> str:
        """A base model; the refusal of another name says which names are near to it."""
        store = self._service.store
        try:
            return _base(self._service, name)
        except ApiError:
            names = await store.call(store.names.of_user, user.user_id)
            runs = await store.call(store.models.names, user.user_id, MAX_LISTED)
            known = [*self._service.catalog.names, *(named.name for named in names), *runs]
            hint = await asyncio.to_thread(did_you_mean, name, known)
            raise _unknown(self._service, name, hint) from None

    async def _on_base(self, user: User, name: str, base: str, path: str) -> SampleTarget:
        """`BASE;PATH`: a checkpoint with the context that the name of its base model asks for."""
        service, catalog = self._service, self._service.catalog
        checkpoint = await service.shelf.readable(path, user)
        if catalog.resolve(_base(service, base)) != catalog.resolve(checkpoint.base_model):
            raise ApiError(
                400,
                f"{path} was trained on {checkpoint.base_model!r}, not on {base[:200]!r}.",
                path="model",
            )
        await catalog.check_context(base, path="model")
        return SampleTarget(name, base, path)

    async def listed(self, user: User) -> list[ListedModel]:
        """Every model of the caller: base models, names, runs, checkpoints; the newest first."""
        store = self._service.store
        listed = [ListedModel(name) for name in self._service.catalog.names]
        rows, _ = await store.call(store.checkpoints.page, user.user_id, MAX_LISTED, 0)
        by_path = {row.path: row for row in rows}
        for named in (await store.call(store.names.of_user, user.user_id))[:MAX_LISTED]:
            row = by_path.get(named.path) or await store.call(store.checkpoints.get, named.path)
            # One that was shared when it was named may be its owner's alone by now.
            if row is not None and (row.public or row.user_id == user.user_id):
                listed.append(ListedModel(named.name, row, "name"))
        taken = {model.name for model in listed}
        listed += await store.call(self._runs, user.user_id, taken)
        sampled = [row for row in rows if row.kind != "external_weights"]
        return listed + [ListedModel(row.path, row, "checkpoint") for row in sampled]

    def _runs(self, user_id: str, taken: set[str]) -> list[ListedModel]:
        """The runs of a user that have a checkpoint, by name, unless it means something else."""
        store = self._service.store
        models, _ = store.models.page(user_id, MAX_LISTED, 0)
        sessions = store.sessions.by_id({model.session_id for model in models})
        segments = segment_ids(store, models)
        latest = {run_id: ids[-MAX_SEGMENTS:] for run_id, ids in segments.items()}
        last = _last_checkpoints(store, latest)
        listed: dict[str, ListedModel | None] = dict.fromkeys(taken)
        for model in models:
            session = sessions.get(model.session_id)
            name = name_of(model, session)
            if name is not None and name not in listed:
                checkpoint = last.get(model.model_id)
                # The newest run of a name is meant by it, also one without a checkpoint.
                listed[name] = ListedModel(name, checkpoint, "run") if checkpoint else None
        return [model for model in listed.values() if model is not None]


def _last_checkpoints(
    store: Store, segment_ids: Mapping[str, Sequence[str]]
) -> dict[str, Checkpoint]:
    """The newest checkpoint of each run: one to sample from, else one to train on from. Blocks."""
    last: dict[str, Checkpoint] = {}
    for kind in reversed(SAMPLED_KINDS):
        last |= last_checkpoints(store, segment_ids, kind)
    return last


def _base(service: Service, name: str) -> str:
    try:
        service.catalog.resolve(name)
    except InvalidInputError as exc:
        raise _unknown(service, name) from exc
    return name


def _unknown(service: Service, name: str, hint: str = "") -> ApiError:
    return ApiError(
        404,
        f"The model {name[:200]!r} does not exist here.{hint} Base models: "
        f"{', '.join(service.catalog.names)}. A run goes by its name, a checkpoint by its "
        "tinker:// path, or by a name that `tinkex checkpoint name` gave it.",
        code="model_not_found",
        path="model",
    )
