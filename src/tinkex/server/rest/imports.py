"""`POST /checkpoints/import`: an adapter made elsewhere becomes a checkpoint of a run of its own.

An extension of ours. The body is a tar of the adapter's folder (`adapter_config.json` and its
weights, as `peft` writes them). Nothing is listed before the engine has loaded it once: an adapter
that does not fit its base model is refused here, not at the first training step.
"""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import shutil
import tarfile
import time
import uuid
from pathlib import Path, PurePosixPath
from typing import Any

from fastapi import APIRouter, Request

from tinkex.engine.jobs import DropAdapterJob, LoadAdapterJob
from tinkex.errors import InvalidInputError
from tinkex.server.auth import CurrentUser
from tinkex.server.exchange import read_body, service_of
from tinkex.server.files.checkpoints import TinkerPath, check_name, folder_size
from tinkex.server.problems import ApiError
from tinkex.server.rest.inputs import Text
from tinkex.server.service import Service
from tinkex.store import Checkpoint, Model, Session, User

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])
CONFIG = "adapter_config.json"
MAX_FILES = 64


@router.post("/checkpoints/import")
async def import_checkpoint(
    request: Request, user: CurrentUser, name: Text = "imported", base_model: Text | None = None
) -> dict[str, Any]:
    check_name(name)
    if getattr(request.app.state, "service", None) is None:
        raise ApiError(503, "No worker runs here that could check the adapter.")
    service = service_of(request)
    body = await read_body(request)
    target = TinkerPath(f"{uuid.uuid4()}:train:0", "weights", name)
    folder = service.shelf.new_folder(target)
    try:
        config = await asyncio.to_thread(_unpack, body, folder)
        base = service.catalog.resolve(base_model or str(config.get("base_model_name_or_path")))
        await _try_to_load(service, folder, base)
        checkpoint = await _list(service, target, folder, config, base, user)
    except BaseException:
        service.shelf.abandon(folder)
        await asyncio.to_thread(shutil.rmtree, folder, True)
        raise
    return {"tinker_path": checkpoint.path, "base_model": base, "size_bytes": checkpoint.size_bytes}


def _unpack(body: bytes, folder: Path) -> dict[str, Any]:
    """Write the files of the tar into a new folder and read the adapter's config."""
    aside = folder.with_name(f"{folder.name}.tmp")
    aside.mkdir()
    try:
        # Plain tar only: a compressed one could unpack to any size.
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:") as archive:
            for index, member in enumerate(archive):
                _check_member(index, member)
                source = archive.extractfile(member)
                assert source is not None
                with (aside / member.name).open("wb") as out:
                    shutil.copyfileobj(source, out)
        config = _read_config(aside / CONFIG)
        aside.rename(folder)
    except tarfile.TarError as exc:
        raise InvalidInputError(f"the body is not a tar archive: {exc}.") from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return config


def _check_member(index: int, member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name)
    if not member.isreg() or len(path.parts) != 1 or path.name.startswith("."):
        raise InvalidInputError(
            f"the archive holds {member.name[:80]!r}; it may hold plain files without folders."
        )
    if index >= MAX_FILES:
        raise InvalidInputError(f"the archive holds more than {MAX_FILES} files.")


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
        rank = config["r"]
    except FileNotFoundError:
        raise InvalidInputError(f"the archive holds no {CONFIG}.") from None
    except (ValueError, KeyError, TypeError) as exc:
        raise InvalidInputError(f"{CONFIG} is not a LoRA config: {exc!r}.") from exc
    if not isinstance(rank, int) or rank < 1:
        raise InvalidInputError(f"{CONFIG} has r={rank!r}; a rank is a whole number above 0.")
    return dict(config)


async def _try_to_load(service: Service, folder: Path, base_model: str) -> None:
    worker = service.placement.places[0].worker
    adapter_id = f"import-{secrets.token_hex(8)}"
    job = LoadAdapterJob(
        job_id=f"{adapter_id}-load",
        adapter_id=adapter_id,
        base_model=base_model,
        folder=str(folder),
        with_optimizer=False,
    )
    try:
        await worker.run(job)
    finally:
        await worker.run(DropAdapterJob(job_id=f"{adapter_id}-drop", adapter_id=adapter_id))


def _lora(config: dict[str, Any]) -> dict[str, Any]:
    """What the run's LoRA fields say about a foreign adapter, from the modules it targets."""
    targets = config.get("target_modules") or []
    names = " ".join([targets] if isinstance(targets, str) else targets)
    known = bool(names) and names != "all-linear"
    return {
        "rank": int(config["r"]),
        "alpha": float(config.get("lora_alpha", 32)),
        "seed": None,
        "train_attn": not known or any(part in names for part in ("q_", "k_", "v_", "o_", "attn")),
        "train_mlp": not known or any(part in names for part in ("gate", "up_", "down_", "mlp")),
        "train_unembed": not known or "lm_head" in names,
    }


async def _list(
    service: Service,
    target: TinkerPath,
    folder: Path,
    config: dict[str, Any],
    base_model: str,
    user: User,
) -> Checkpoint:
    now = time.time()
    session_id = target.run_id.split(":")[0]
    metadata = {"origin": "import"}
    session = Session(
        session_id=session_id,
        user_id=user.user_id,
        created_at=now,
        last_heartbeat=now,
        tags=[],
        user_metadata=metadata,
        display_name=None,
        project_id=None,
        sdk_version="",
        status={"type": "client_finished", "reason": {"type": "success"}},
    )
    model = Model(
        model_id=target.run_id,
        session_id=session_id,
        user_id=user.user_id,
        model_seq_id=0,
        base_model=base_model,
        lora=_lora(config),
        optimizer_config={"type": "adamw"},
        user_metadata=metadata,
        created_at=now,
        last_request_time=now,
        corrupted=False,
        unloaded=True,
    )
    checkpoint = Checkpoint(
        path=str(target),
        model_id=target.run_id,
        user_id=user.user_id,
        kind=target.kind,
        name=target.name,
        folder=service.shelf.folders.name(folder),
        size_bytes=await asyncio.to_thread(folder_size, folder),
        base_model=base_model,
        lora=model.lora,
        created_at=now,
        user_metadata=metadata,
    )
    await service.store.call(service.store.sessions.create, session)
    await service.store.call(service.store.models.create, model)
    await service.shelf.register(checkpoint)
    return checkpoint
