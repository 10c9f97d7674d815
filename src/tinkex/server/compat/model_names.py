"""Which weights a model name means: a base model, an alias, a checkpoint, or a name of the user's.

The adapter named is the adapter served: a name that is none of these is refused, never answered by
a base model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tinkex.errors import InvalidInputError
from tinkex.server.process.problems import ApiError
from tinkex.server.service.service import Service
from tinkex.store import User
from tinkex.types.account.checkpoints import is_tinker_path

MAX_LISTED = 1000
MAX_KNOWN = 10_000
KNOWN_S = 1.0


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """The weights that a name stands for."""

    name: str
    """As the caller wrote it."""
    base_model: str
    model_path: str | None = None


class ModelNames:
    """Which weights the names of each user mean.

    What was found is taken for granted for a second: the sample itself asks again whether its
    checkpoint may be read, and two questions of the database cost a short answer its latency.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[tuple[str, str], tuple[float, SampleTarget]] = {}

    async def target(self, user: User, name: str) -> SampleTarget:
        """The weights behind a name.

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
        if not is_tinker_path(name):
            named = await service.store.call(service.store.names.get, user.user_id, name)
            if named is None:
                return SampleTarget(name, _base(service, name))
            path = named.path
        found = await service.shelf.readable(path, user)
        return SampleTarget(name, found.base_model, path)

    async def listed(self, user: User) -> list[SampleTarget]:
        """Every model of the caller: base models, names, sampler checkpoints; newest last."""
        store = self._service.store
        found = [SampleTarget(name, name) for name in self._service.catalog.names]
        for named in await store.call(store.names.of_user, user.user_id):
            found.append(SampleTarget(named.name, "", named.path))
        rows, _ = await store.call(store.checkpoints.page, user.user_id, MAX_LISTED, 0)
        sampled = [row for row in rows if row.kind != "external_weights"]
        return found + [SampleTarget(row.path, row.base_model, row.path) for row in sampled]


def _base(service: Service, name: str) -> str:
    try:
        service.catalog.resolve(name)
    except InvalidInputError as exc:
        raise ApiError(
            404,
            f"The model {name[:200]!r} does not exist here. Base models: "
            f"{', '.join(service.catalog.names)}. A checkpoint goes by its tinker:// path, or by "
            "a name that `tinkex checkpoint name` gave it.",
            code="model_not_found",
            path="model",
        ) from exc
    return name
