"""`/signed/...`: the downloads behind signed links. No key is needed; the link is the permission.

Files and archives answer Range requests, so a broken download goes on where it stopped. A link
names who asked for it, with which key, and which version of a checkpoint: it ends when the key is
revoked, and when the checkpoint is deleted, replaced, or no longer shared with who asked.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse, StreamingResponse

from tinkex.server.files.tar import FolderTar
from tinkex.server.guard.auth import USER_ID, credential_of
from tinkex.server.http.bodies import reserve_answer
from tinkex.server.http.dependencies import dependencies_of
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import Text
from tinkex.server.process.problems import ApiError
from tinkex.server.rest.trace import MAX_REQUESTS, trace_of
from tinkex.server.service.service import Service
from tinkex.store import Checkpoint, Store

router = APIRouter(prefix="/api/v1/signed", tags=["files"])
TRACE_BYTES = 32 * 1024 * 1024
"""Reserved for a trace before it is made: about the size of the largest."""
# One range only. A request for several gets the whole archive, as RFC 9110 (14.2) allows.
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


async def link(
    request: Request, resource: dict[str, Any], file_name: str, *, to: str = "signed"
) -> tuple[str, float]:
    """A URL of the route `to` that opens `resource` for an hour, and when it ends."""
    parts = dependencies_of(request)
    user_id, key_id = await parts.auth.grantor(credential_of(request))
    signed = parts.signer.sign({**resource, "user": user_id, "key": key_id})
    base = parts.config.public_url or str(request.base_url).rstrip("/")
    return f"{base}/api/v1/{to}/{signed.token}/{quote(file_name)}", signed.expires_at


@serve(router, "download")
async def download(request: Request, token: Text, file_name: Text) -> Response:
    parts = dependencies_of(request)
    store = parts.store
    resource = parts.signer.open(token)
    if not await parts.auth.may_act(resource.get("key"), str(resource.get("user"))):
        raise ApiError(403, "The key this link was made with is revoked. Ask for a new link.")
    if "upload" in resource:
        raise ApiError(403, "This link is for an upload: PUT the file to it.")
    if "trace" in resource:
        return await _trace(request, str(resource.get("user")), resource)
    folder = await parts.shelf.at_hand((await _checkpoint(store, resource)).folder)
    if "archive" in resource:
        return await asyncio.to_thread(archive, request, folder, file_name)
    return await asyncio.to_thread(_file, folder, resource["name"])


async def _checkpoint(store: Store, resource: dict[str, Any]) -> Checkpoint:
    """The version that the link names, if who asked for it may still read it."""
    path = resource.get("archive") or resource["file"]
    checkpoint = await store.call(store.checkpoints.get, path)
    if checkpoint is None:
        raise ApiError(404, f"{path} was deleted or has expired.")
    if not (checkpoint.public or checkpoint.user_id == resource.get("user")):
        raise ApiError(404, f"{path} is no longer shared.")
    if checkpoint.folder != resource.get("version"):
        raise ApiError(404, f"{path} was replaced since this link was made. Ask for a new link.")
    return checkpoint


def _file(folder: Path, name: str) -> Response:
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        raise ApiError(404, f"The checkpoint has no file {name!r} any more.")
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)


def archive(request: Request, folder: Path, file_name: str) -> Response:
    """A folder as a tar, or the part of it that is asked for."""
    tar = FolderTar(folder)
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file_name)}",
    }
    span = _span(request.headers.get("range"), tar.size_bytes)
    if span is None:
        start, end, status = 0, tar.size_bytes, 200
    else:
        start, end, status = *span, 206
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{tar.size_bytes}"
    headers["Content-Length"] = str(end - start)
    return StreamingResponse(tar.read(start, end), status, headers, "application/x-tar")


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """The one byte range asked for, as [start, end); None for the whole. 416 when out of reach."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if start >= size or end <= start:
        raise ApiError(
            416, "The range lies outside the file.", headers={"Content-Range": f"bytes */{size}"}
        )
    return start, end


async def _trace(request: Request, user_id: str, resource: dict[str, Any]) -> Response:
    """A trace, in a turn of its user: it is made of very many rows."""
    parts = dependencies_of(request)
    request.scope[USER_ID] = user_id  # whose room and turn it takes
    async with parts.drawing.slot(user_id):
        await reserve_answer(request, TRACE_BYTES)
        trace = await session_trace(parts.service, resource["trace"], resource.get("run"))
    return Response(trace, media_type="application/octet-stream")


async def session_trace(service: Service, session_id: str, run_id: str | None) -> bytes:
    """The trace of a session, or of one of its runs. Who may see it is decided before."""
    store = service.store
    session = await store.call(store.sessions.get, session_id)
    if session is None:
        raise ApiError(404, f"Session {session_id!r} is gone.")
    models = await store.call(store.models.of_session, session_id)
    if run_id is not None:
        models = [model for model in models if model.model_id == run_id]
    ids = [model.model_id for model in models]
    await service.ends.caught_up()  # a client may know the end of a request before the journal
    ops = await store.call(store.journal.timings, ids, MAX_REQUESTS)
    spans = service.timelines.of_user(session.user_id)
    return await asyncio.to_thread(trace_of, session, models, ops[::-1], spans)
