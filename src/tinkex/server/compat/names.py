"""Which weights a model name means: a base model, an alias, a checkpoint, or a name of the user's.

The adapter named is the adapter served: a name that is none of these is refused, never answered by
a base model.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.errors import InvalidInputError
from tinkex.server.problems import ApiError
from tinkex.server.service import Service
from tinkex.store import User

MAX_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Target:
    """What to sample from."""

    name: str
    """As the caller wrote it."""
    base_model: str
    model_path: str | None = None


async def target_of(service: Service, user: User, name: str) -> Target:
    """The weights behind a name.

    Raises:
        ApiError: 404, with what there is.
    """
    path = name
    if not name.startswith("tinker://"):
        named = await service.store.call(service.store.names.get, user.user_id, name)
        if named is None:
            return Target(name, _base(service, name))
        path = named.path
    found = await service.shelf.readable(path, user)
    return Target(name, found.base_model, path)


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


async def listed(service: Service, user: User) -> list[Target]:
    """Every model of the caller: base models, names, sampler checkpoints; newest last."""
    store = service.store
    found = [Target(name, name) for name in service.catalog.names]
    for named in await store.call(store.names.of_user, user.user_id):
        found.append(Target(named.name, "", named.path))
    rows, _ = await store.call(store.checkpoints.page, user.user_id, MAX_LISTED, 0)
    found += [Target(r.path, r.base_model, r.path) for r in rows if r.kind != "external_weights"]
    return found
