"""`/checkpoints` and everything under a run's `checkpoints/<kind>/<name>`.

Reading (list, files, archive, copy) works on public checkpoints of others too; changing one is its
owner's right. Publishing what is public already, or deleting a TTL that is not set, is a success:
clients repeat such calls after a lost answer, and a 409 would make them try for minutes.
"""

from __future__ import annotations

import asyncio
import uuid
from email.utils import formatdate
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import RedirectResponse

from tinkex import types
from tinkex.server.fairness.gate import FairGate
from tinkex.server.files.checkpoints import Shelf, checked_path, expiry_of
from tinkex.server.guard.auth import Auth, CurrentUser
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.http.dependencies import dependencies_of
from tinkex.server.http.handlers import answer, serve
from tinkex.server.http.inputs import Limit, Offset, Text, cursor, moment
from tinkex.server.rest.files import link
from tinkex.server.rest.runs import visible_run
from tinkex.server.rest.views import checkpoint_view
from tinkex.server.runs import idle_run
from tinkex.store import Checkpoint, Store, User
from tinkex.types.account.checkpoints import TinkerPath

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])


async def _path(run_id: Text, kind: Text, name: Text) -> TinkerPath:
    return checked_path(run_id, kind, name)


Where = Annotated[TinkerPath, Depends(_path)]


@serve(router, "list_user_checkpoints")
async def list_all(
    store: Store, user: User, limit: Limit = 100, offset: Offset = 0
) -> types.CheckpointsListResponse:
    found, total = await store.call(store.checkpoints.page, user.user_id, limit, offset)
    views = [checkpoint_view(checkpoint) for checkpoint in found]
    return types.CheckpointsListResponse(checkpoints=views, cursor=cursor(offset, limit, total))


@serve(router, "list_checkpoints")
async def list_of_run(
    store: Store, drawing: FairGate, user: User, run_id: Text
) -> types.CheckpointsListResponse:
    """All of them: the call has no pages, so few are answered at a time."""
    model = await visible_run(store, run_id, user, with_public=True)
    mine = model.user_id == user.user_id
    async with drawing.slot(user.user_id):
        checkpoints = await store.call(store.checkpoints.of_run, model.model_id)
        shown = [checkpoint for checkpoint in checkpoints if mine or checkpoint.public]
        views = await asyncio.to_thread(lambda: list(map(checkpoint_view, shown)))
    return types.CheckpointsListResponse(checkpoints=views)


@serve(router, "delete_checkpoint")
async def delete(shelf: Shelf, user: User, path: Where) -> None:
    await shelf.delete(await shelf.owned(path, user))


@serve(router, "publish_checkpoint")
async def publish(shelf: Shelf, user: User, path: Where) -> None:
    await shelf.set_public(await shelf.owned(path, user), True)


@serve(router, "unpublish_checkpoint")
async def unpublish(shelf: Shelf, user: User, path: Where) -> None:
    await shelf.set_public(await shelf.owned(path, user), False)


@serve(router, "set_checkpoint_ttl")
async def set_ttl(
    shelf: Shelf, user: User, path: Where, asked: types.SetCheckpointTtlRequest
) -> None:
    await shelf.set_ttl(await shelf.owned(path, user), asked.ttl_seconds)


@serve(router, "checkpoint_archive")
async def archive(request: Request, user: CurrentUser, path: Where) -> Response:
    """A link to the checkpoint as one tar: a 302 for clients that ask for the archive itself."""
    shelf = dependencies_of(request).shelf
    checkpoint = await shelf.readable(str(path), user)
    resource = {"archive": checkpoint.path, "version": checkpoint.folder}
    url, expires = await link(request, resource, f"{path.name}.tar")
    shelf.log(user.user_id, "checkpoint_downloaded", checkpoint.path)
    # Old clients send their usual Accept as well as this one; they know the 302 alone.
    accepted = ", ".join(request.headers.getlist("accept"))
    if "application/json" in accepted and "application/gzip" not in accepted:
        return answer(types.CheckpointArchiveUrlResponse(url=url, expires=moment(expires)))
    return RedirectResponse(url, 302, {"Expires": formatdate(expires, usegmt=True)})


@serve(router, "external_weights_urls")
async def file_urls(request: Request, user: CurrentUser, path: Where) -> Response:
    """A signed link for each file. Works for every kind, not only for external weights."""
    shelf = dependencies_of(request).shelf
    checkpoint = await shelf.readable(str(path), user)
    files = await asyncio.to_thread(_relative_files, await shelf.at_hand(checkpoint.folder))
    urls: dict[str, str] = {}
    expires = 0.0
    for file in files:
        resource = {"file": checkpoint.path, "version": checkpoint.folder, "name": file}
        urls[file], expires = await link(request, resource, file)
    shelf.log(user.user_id, "checkpoint_downloaded", checkpoint.path)
    return answer(types.ExternalWeightsUrlsResponse(urls=urls, expires=moment(expires)))


@serve(router, "copy_weights")
async def copy_weights(
    auth: Auth,
    failed_logins: FailedLogins,
    shelf: Shelf,
    store: Store,
    user: User,
    asked: types.CopyWeightsRequest,
    x_idempotency_key: Annotated[Text | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[Text | None, Header()] = None,
) -> types.CopyWeightsResponse:
    token = x_tinker_weights_access_token or asked.weights_access_token
    expires_at = expiry_of(asked.ttl_seconds)
    owner = await auth.reader_of(token, failed_logins, user) if token else None
    source = await shelf.readable(asked.source_path, user, token_user=owner)
    key = x_idempotency_key or str(uuid.uuid4())
    # The key is bound to a run id first, so that a repeat meets the same target at any point.
    run_id = await store.call(store.checkpoints.remember, user.user_id, key, idle_run.new_run_id())
    target = TinkerPath(run_id, source.kind, source.name)
    async with shelf.copying.setdefault(str(target), asyncio.Lock()):
        if await store.call(store.checkpoints.get, str(target)) is None:
            await _make_run(store, target, source, user, asked.destination_project_id)
            changes = {"expires_at": expires_at, "project_id": asked.destination_project_id}
            await shelf.copy(source, target, user, **changes)
    return types.CopyWeightsResponse(tinker_path=str(target))


async def _make_run(
    store: Store, target: TinkerPath, source: Checkpoint, user: User, project_id: str | None
) -> None:
    """A copy lies in a run of its own, which holds nothing else and was never loaded."""
    if await store.call(store.models.get, target.run_id) is not None:
        return
    await idle_run.add(
        store,
        target.run_id,
        user,
        base_model=source.base_model,
        lora=source.lora,
        optimizer_config=source.optimizer_config,
        metadata={"copied_from": source.path},
        project_id=project_id,
    )


def _relative_files(folder: Path) -> list[str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file.relative_to(folder).as_posix() for file in files)
