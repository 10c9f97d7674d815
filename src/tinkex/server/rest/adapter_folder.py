"""An adapter's folder that came from elsewhere: loaded once, then listed.

Imports (`imports.py`) and uploads (`uploads.py`) fill such a folder in their own ways, and
`files.adapter_archive` reads it in the sandbox; what is believed of it is decided here. Nothing is
listed before the engine has loaded it once: an adapter that does not fit its base model is refused
then, not at the first training step. The digest that a manifest claims for its weights is dropped:
the one listed is what the engine computed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkex.engine.folders import DIGEST, WEIGHTS
from tinkex.server.files.folders import folder_size
from tinkex.server.runs import idle_run
from tinkex.server.service.service import Service
from tinkex.server.workers.worker import adapter_for_a_moment
from tinkex.store import Checkpoint, User
from tinkex.types.account.checkpoints import TinkerPath


def _put_digest(folder: Path, manifests: Sequence[str], content: str) -> None:
    """Name the computed digest in the manifests that had claimed one."""
    for name in manifests if content else ():
        manifest = json.loads((folder / name).read_bytes()) | {DIGEST: content}
        aside = folder / f".{name}.new"
        aside.write_text(json.dumps(manifest, indent=2) + "\n")
        aside.replace(folder / name)


async def prove(
    service: Service,
    folder: Path,
    base_model: str,
    claims: Sequence[str],
    user: User,
) -> None:
    """Have the engine load the adapter once, and write the digest it computed where one stood.

    It has the turn that its user has: another user's samples do not wait for it.

    Args:
        claims: Manifests that had named a digest.

    Raises:
        TinkerError: The adapter does not fit, as the engine says it.
    """
    weights = folder / WEIGHTS
    cost = weights.stat().st_size if weights.exists() else 1
    pool, user_id = service.workers.pool, user.user_id
    async with (
        service.open_work.slot(user_id),
        service.workers.training.slot(user_id, cost),
        adapter_for_a_moment(pool, "import", base_model=base_model, folder=str(folder)) as (
            _,
            loaded,
        ),
    ):
        content = loaded.content
    await asyncio.to_thread(_put_digest, folder, claims, content)


def lora_of(config: dict[str, Any]) -> dict[str, Any]:
    """The run's LoRA fields for a foreign adapter, from the modules it targets."""
    names = target_names(config)
    known = names is not None
    names = names or ""
    return {
        "rank": int(config["r"]),
        "alpha": float(config.get("lora_alpha", 32)),
        "seed": None,
        "train_attn": not known or any(part in names for part in ("q_", "k_", "v_", "o_", "attn")),
        "train_mlp": not known or any(part in names for part in ("gate", "up_", "down_", "mlp")),
        "train_unembed": not known or "lm_head" in names,
    }


def target_names(config: dict[str, Any]) -> str | None:
    """The names of the modules that an adapter changes; None where its config does not say."""
    targets = config.get("target_modules") or []
    names = " ".join(map(str, targets)) if isinstance(targets, list) else str(targets)
    return names if names and names != "all-linear" else None


async def list_checkpoint(
    service: Service,
    target: TinkerPath,
    folder: Path,
    user: User,
    *,
    lora: dict[str, Any],
    base_model: str,
    origin: str,
    project_id: str | None = None,
) -> Checkpoint:
    """List a folder as a checkpoint, in a run of its own."""
    metadata = {"origin": origin}
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
        project_id=project_id,
    )
    await idle_run.add(
        service.store,
        target.run_id,
        user,
        base_model=base_model,
        lora=lora,
        optimizer_config={"type": "adamw"},
        metadata=metadata,
        project_id=project_id,
    )
    await service.shelf.register(checkpoint)
    return checkpoint
