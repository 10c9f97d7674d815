"""`external_weights_upload_start`, a PUT for each file, `external_weights_upload_finish`.

Weights in the form that `save_weights_external` writes become an export of the caller's own. The
key is judged when the upload is started and finished, and with every file: a link names the key it
was made with, and takes one file once.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from tinkex import types
from tinkex.engine.folders import CONFIG
from tinkex.errors import InvalidInputError
from tinkex.server.files.disk_quota import OverQuotaError
from tinkex.server.files.uploads import Upload
from tinkex.server.guard.auth import USER_ID, CurrentUser
from tinkex.server.http.bodies import body_pieces, declared_bytes, header, read
from tinkex.server.http.dependencies import AppDependencies, dependencies_of
from tinkex.server.http.handlers import answer, serve
from tinkex.server.http.inputs import Text, moment
from tinkex.server.process.problems import ApiError
from tinkex.server.rest import adapter_folder
from tinkex.server.rest.files import link
from tinkex.server.runs import idle_run
from tinkex.server.sandbox.sandbox import Sandbox
from tinkex.server.service.service import Service
from tinkex.store import User
from tinkex.types.account.checkpoints import TinkerPath

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])
NAME = "uploaded"
_PARTS = ("train_attn", "train_mlp", "train_unembed")


@serve(router, "external_weights_upload_start")
async def start(request: Request, user: CurrentUser) -> Response:
    asked: types.ExternalWeightsUploadStartRequest
    asked = await read(request, "external_weights_upload_start")
    parts = dependencies_of(request)
    parts.service.catalog.resolve(asked.base_model)
    await parts.service.catalog.check_context(asked.base_model)
    names = parts.config.engine_kind.adapter_files
    upload = await parts.shelf.uploads.start(
        user.user_id,
        names,
        base_model=asked.base_model,
        lora=asked.lora_config.model_dump(),
        project_id=asked.destination_project_id,
    )
    urls = {}
    for name in names:
        resource = {"upload": upload.upload_id, "name": name}
        urls[name], _ = await link(request, resource, name, to="uploads")
    return answer(
        types.ExternalWeightsUploadStartResponse(
            upload_id=upload.upload_id, urls=urls, expires=moment(upload.expires_at)
        )
    )


@serve(router, "upload_file")
async def upload_file(request: Request, token: Text, file_name: Text) -> Response:
    """Take one file. No key is needed; the link is the permission."""
    parts = dependencies_of(request)
    resource = parts.signer.open(token)
    user_id = str(resource.get("user"))
    if "upload" not in resource:
        raise ApiError(403, "This link is for a download.")
    if not await parts.auth.may_act(resource.get("key"), user_id):
        raise ApiError(403, "The key this link was made with is revoked. Start another upload.")
    if header(request, b"content-encoding").strip().lower() not in ("", "identity"):
        raise ApiError(415, "Send the file as it is, without a Content-Encoding.")
    upload, name = parts.shelf.uploads.of_user(resource["upload"], user_id), resource["name"]
    request.scope[USER_ID] = user_id

    await _note_limits(parts, user_id)

    def admit(reserved: str, num_bytes: int) -> None:
        parts.service.room.require()
        parts.shelf.disk_quota.admit(reserved, user_id, num_bytes)

    file = await parts.shelf.uploads.receive(
        upload, name, body_pieces(request), declared_bytes=declared_bytes(request), admit=admit
    )
    return answer({"size_bytes": file.size_bytes, "sha256": file.sha256})


@serve(router, "external_weights_upload_finish")
async def finish(
    service: Service,
    sandbox: Sandbox,
    user: User,
    asked: types.ExternalWeightsUploadFinishRequest,
) -> types.ExternalWeightsUploadFinishResponse:
    """Make a checkpoint of an upload. A repeat gives the same one."""
    uploads = service.shelf.uploads
    upload = uploads.of_user(asked.upload_id, user.user_id)
    async with uploads.finishing(upload) as files:
        if upload.tinker_path is None:
            if upload.missing:
                raise InvalidInputError(
                    f"not uploaded yet: {', '.join(upload.missing)}. PUT each to its URL, then "
                    "finish again.",
                    path="upload_id",
                )
            try:
                path = await _checkpoint(service, sandbox, upload, files, user)
            except InvalidInputError as exc:
                if isinstance(exc, OverQuotaError):
                    raise  # it can be finished when there is room
                # Its links are used up, so it can never be right; its bytes make room.
                await uploads.drop(upload)
                raise InvalidInputError(
                    f"{str(exc).rstrip('.')}. The upload is removed; start another.",
                    path="upload_id",
                ) from exc
            await uploads.finished(upload, path)
    assert upload.tinker_path is not None
    return types.ExternalWeightsUploadFinishResponse(tinker_path=upload.tinker_path)


async def _checkpoint(
    service: Service, sandbox: Sandbox, upload: Upload, files: Path, user: User
) -> str:
    base_model = service.catalog.resolve(upload.base_model)
    target = TinkerPath(idle_run.new_run_id(), "external_weights", NAME)
    async with service.shelf.making(target) as folder:
        await asyncio.to_thread(_put_files, files, folder)
        said = await sandbox.run(user.user_id, "inspect_adapter", {"folder": str(folder)})
        _check_agreement(upload, said["config"], service)
        await adapter_folder.prove(service, folder, base_model, said["claims"], user)
        await _list(service, upload, target, folder, said["config"], user)
    return str(target)


async def _list(
    service: Service,
    upload: Upload,
    target: TinkerPath,
    folder: Path,
    config: dict[str, Any],
    user: User,
) -> None:
    """List the checkpoint, whose bytes count in place of the upload's, and never neither."""
    service.shelf.uploads.release(upload)
    try:
        service.shelf.reserve(folder, user.user_id, upload.size_bytes)
        await adapter_folder.list_checkpoint(
            service,
            target,
            folder,
            user,
            lora=adapter_folder.lora_of(config),
            base_model=upload.base_model,
            origin="upload",
            project_id=upload.project_id,
        )
    except BaseException:
        service.shelf.uploads.reserve(upload)
        raise


def _put_files(files: Path, folder: Path) -> None:
    """Put the files into a new folder. The upload keeps its own."""
    folder.mkdir()
    for file in files.iterdir():
        _link_or_copy(file, folder / file.name)


def _link_or_copy(source: Path, target: Path) -> None:
    # A manifest may be written anew, which the upload must not see; weights never change.
    if source.suffix != ".json":
        try:
            os.link(source, target)
            return
        except OSError:  # a file system without links
            pass
    shutil.copyfile(source, target)


def _check_agreement(upload: Upload, config: dict[str, Any], service: Service) -> None:
    """Refuse files of another adapter than was announced.

    Raises:
        InvalidInputError: The rank, alpha, trained parts or base model differ.
    """
    asked, found = upload.lora, adapter_folder.lora_of(config)
    named = config.get("base_model_name_or_path")
    differ = [("rank", asked["rank"], found["rank"])]
    if asked.get("alpha") is not None:
        differ.append(("alpha", asked["alpha"], found["alpha"]))
    if adapter_folder.target_names(config) is not None:
        differ += [(part, asked[part], found[part]) for part in _PARTS if not asked[part]]
    for what, wanted, has in differ:
        if wanted != has:
            raise InvalidInputError(
                f"the upload was started for {what}={wanted}, and {CONFIG} has {what}={has}."
            )
    catalog = service.catalog
    if named in catalog.names and catalog.resolve(named) != catalog.resolve(upload.base_model):
        raise InvalidInputError(
            f"the upload was started for {upload.base_model!r}, and {CONFIG} names {named!r}."
        )


async def _note_limits(parts: AppDependencies, user_id: str) -> None:
    """A link has no caller whose own limits the door would have noted."""
    if (user := await parts.store.call(parts.store.accounts.get_user, user_id)) is not None:
        parts.quotas.note(user)
