"""`POST /checkpoints/import`: an adapter made elsewhere becomes a checkpoint of a run of its own.

An extension of ours. The body is a tar of the adapter's folder (`adapter_config.json` and its
weights, as `peft` writes them). Nothing is listed before the engine has loaded it once: an adapter
that does not fit its base model is refused here, not at the first training step. The digest that a
manifest claims for its weights is dropped: the one listed is what the engine computed.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from tinkex.engine.folders import DIGEST, MANIFESTS
from tinkex.engine.jobs import AdapterResult, DropAdapterJob, LoadAdapterJob
from tinkex.errors import InvalidInputError
from tinkex.server.files.folders import folder_size
from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.bodies import read_body
from tinkex.server.http.dependencies import service_of
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import Text
from tinkex.server.rest import idle_run
from tinkex.server.service.service import Service
from tinkex.server.workers.worker import run
from tinkex.store import Checkpoint, User
from tinkex.types.account.checkpoints import TinkerPath, check_name
from tinkex.wire import tar

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])
CONFIG = "adapter_config.json"
MAX_FILES = 64
MAX_CONFIG_BYTES = 1024 * 1024
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@serve(router, "import_checkpoint")
async def import_checkpoint(
    request: Request, user: CurrentUser, name: Text = "imported", base_model: Text | None = None
) -> dict[str, Any]:
    check_name(name)
    service = service_of(request)
    # Before the body is read: on a full disk a large upload would be for nothing.
    service.room.require()
    body = await read_body(request)
    target = TinkerPath(idle_run.new_run_id(), "weights", name)
    async with service.shelf.making(target) as folder:
        config, claims = await asyncio.to_thread(_unpack, body, folder)
        base = service.catalog.resolve(base_model or str(config.get("base_model_name_or_path")))
        content = await _try_to_load(service, folder, base)
        await asyncio.to_thread(_put_digest, folder, claims, content)
        checkpoint = await _list(service, target, folder, config, base, user)
    return {"tinker_path": checkpoint.path, "base_model": base, "size_bytes": checkpoint.size_bytes}


def _unpack(body: bytes, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the files of the tar into a new folder.

    Returns the adapter's config, and the manifests that named a digest, which are without it now.
    """
    aside = folder.with_name(f"{folder.name}.tmp")
    aside.mkdir()
    try:
        # Plain tar only: a compressed one could unpack to any size.
        limits = tar.TarLimits(max_members=MAX_FILES, max_bytes=len(body))
        tar.extract(_checked(tar.members(io.BytesIO(body), limits)), aside, limits)
        config = _read_config(aside / CONFIG)
        claims = [name for name in MANIFESTS if _drop_claim(aside / name)]
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return config, claims


def _drop_claim(file: Path) -> bool:
    """Take the digest out of a foreign manifest; False where it names none."""
    if not file.exists():
        return False
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInputError(f"{file.name} has more than {MAX_CONFIG_BYTES} bytes.")
        manifest = json.loads(file.read_bytes())
        if not isinstance(manifest, dict) or DIGEST not in manifest:
            return False
        del manifest[DIGEST]
        file.write_text(json.dumps(manifest, indent=2) + "\n")
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as exc:
        cause = f"{type(exc).__name__}: {str(exc)[:200]}"
        raise InvalidInputError(f"{file.name} is not the JSON of a manifest: {cause}.") from exc
    return True


def _put_digest(folder: Path, manifests: Sequence[str], content: str) -> None:
    """Name the computed digest in the manifests that had claimed one."""
    for name in manifests if content else ():
        manifest = json.loads((folder / name).read_bytes()) | {DIGEST: content}
        aside = folder / f".{name}.new"
        aside.write_text(json.dumps(manifest, indent=2) + "\n")
        aside.replace(folder / name)


def _checked(found: Iterable[tar.Found]) -> Iterator[tar.Found]:
    """Refuse members that an adapter's folder does not have."""
    for member, data in found:
        if member.name and (member.is_folder or not _FILE.fullmatch(member.name)):
            raise InvalidInputError(
                f"the archive holds {member.name[:80]!r}; it may hold plain files without folders, "
                "named by up to 200 letters, digits and any of _ . -, the first of them no . or -. "
                "Use `tinkex import FOLDER`, which leaves others out, or name the files: tar -cf "
                f"a.tar -C FOLDER {CONFIG} adapter_model.safetensors (COPYFILE_DISABLE=1 on a Mac)."
            )
        yield member, data


def _read_config(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInputError(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes.")
        config = json.loads(file.read_bytes())
        rank, alpha = config["r"], config.get("lora_alpha", 8)
    except FileNotFoundError:
        raise InvalidInputError(f"the archive holds no {CONFIG}.") from None
    except InvalidInputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        cause = f"{type(exc).__name__}: {str(exc)[:200]}"
        raise InvalidInputError(f"{CONFIG} is not a LoRA config: {cause}.") from exc
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= 2**31:
        raise InvalidInputError(f"{CONFIG} has r={rank!r:.80}; a rank is a whole number above 0.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        raise InvalidInputError(f"{CONFIG} has lora_alpha={alpha!r:.80}; it must be a number.")
    return dict(config)


async def _try_to_load(service: Service, folder: Path, base_model: str) -> str:
    """Have the engine load the adapter once; gives the digest of what it read."""
    worker = service.workers.pool
    adapter_id = f"import-{secrets.token_hex(8)}"
    job = LoadAdapterJob(
        job_id=f"{adapter_id}-load",
        adapter_id=adapter_id,
        base_model=base_model,
        folder=str(folder),
        with_optimizer=False,
    )
    try:
        loaded = await run(worker, job)
    finally:
        await run(worker, DropAdapterJob(job_id=f"{adapter_id}-drop", adapter_id=adapter_id))
    assert isinstance(loaded, AdapterResult)
    return loaded.content


def _lora(config: dict[str, Any]) -> dict[str, Any]:
    """The run's LoRA fields for a foreign adapter, from the modules it targets."""
    targets = config.get("target_modules") or []
    names = " ".join(map(str, targets)) if isinstance(targets, list) else str(targets)
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
    lora, metadata = _lora(config), {"origin": "import"}
    checkpoint = Checkpoint(
        path=str(target),
        model_id=target.run_id,
        user_id=user.user_id,
        kind=target.kind,
        name=target.name,
        folder=service.shelf.folders.name(folder),
        size_bytes=await asyncio.to_thread(folder_size, folder),
        base_model=base_model,
        lora=lora,
        created_at=time.time(),
        user_metadata=metadata,
    )
    await idle_run.add(
        service.store,
        target.run_id,
        user,
        base_model=base_model,
        lora=lora,
        optimizer_config={"type": "adamw"},
        metadata=metadata,
    )
    await service.shelf.register(checkpoint)
    return checkpoint
