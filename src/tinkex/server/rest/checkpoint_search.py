"""`POST /checkpoints/search`: a user's checkpoints by project, metadata, type or base model.

Nobody finds what is not theirs: a public checkpoint of another user can be read by its path and is
in no search.
"""

from __future__ import annotations

from fastapi import APIRouter

from tinkex import types
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import moment
from tinkex.server.process.problems import ApiError
from tinkex.server.rest.search import Position, has_metadata, includes, matching_page
from tinkex.server.rest.views import checkpoint_view
from tinkex.store import Checkpoint, CheckpointQuery, Store, User
from tinkex.types import CheckpointSearchRequest as Search
from tinkex.types.account.checkpoints import TYPE_BY_KIND

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])
_KIND_OF = {type_: kind for kind, type_ in TYPE_BY_KIND.items()}


@serve(router, "search_checkpoints")
async def search(store: Store, user: User, asked: Search) -> types.CheckpointSearchResponse:
    await store.call(_check_projects, store, user, asked)
    found, last = await store.call(_search, store, user, asked)
    next_cursor = None
    if last is not None:
        next_cursor = types.CheckpointSearchCursor(
            last_created_at=moment(last[0]), last_checkpoint_uuid=last[1]
        )
    views = [checkpoint_view(checkpoint) for checkpoint in found]
    return types.CheckpointSearchResponse(checkpoints=views, next_cursor=next_cursor)


def _check_projects(store: Store, user: User, asked: Search) -> None:
    """Refuse projects that are not the caller's; another user's looks like one nobody has."""
    known = store.checkpoints.projects_of(user.user_id, asked.project_ids or [])
    for project_id in asked.project_ids or []:
        if project_id not in known:
            text = f"No project {project_id[:200]!r} with sessions or checkpoints of yours."
            raise ApiError(404, text, path="project_ids")


def _search(store: Store, user: User, asked: Search) -> tuple[list[Checkpoint], Position | None]:
    if not includes(asked.owner, user) or asked.base_models == [] or asked.project_ids == []:
        return [], None
    at = asked.cursor
    return matching_page(
        lambda before, limit: store.checkpoints.search(_query(user, asked, before), limit),
        lambda checkpoint: (checkpoint.created_at, checkpoint.path),
        lambda checkpoint: has_metadata(checkpoint.user_metadata, asked.user_metadata),
        before=None if at is None else (at.last_created_at.timestamp(), at.last_checkpoint_uuid),
        limit=asked.limit,
    )


def _query(user: User, asked: Search, before: Position | None) -> CheckpointQuery:
    kind = None if asked.checkpoint_type is None else _KIND_OF[asked.checkpoint_type]
    return CheckpointQuery(
        user_id=user.user_id,
        project_ids=asked.project_ids,
        kind=kind,
        base_models=asked.base_models,
        before=before,
    )
