"""Checkpoint folders of the toy: its table as arrays, and a manifest like the real engine's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from tinkex.engine import jobs
from tinkex.engine.folders import CONFIG, DIGEST, TOY_MANIFEST, write_whole
from tinkex.engine.toy.model import ToyAdapter, pack_gradients
from tinkex.errors import InvalidInputError, ModelNotFoundError

BALLAST = "ballast.bin"
ARRAYS = "adapter_model.npz"


def capture(
    adapter: ToyAdapter, job: jobs.SaveAdapterJob
) -> tuple[dict[str, NDArray[Any]], dict[str, Mapping[str, Any]]]:
    """Arrays and JSON files of a checkpoint, as the adapter is now."""
    arrays = adapter.export()
    arrays["state"][:, [*([] if job.with_optimizer else [2, 3])]] = 0
    if not job.with_gradients:
        arrays.update(pack_gradients({}))
    lora = adapter.lora
    config = {
        "peft_type": "TOY",
        "base_model_name_or_path": adapter.base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
    }
    manifest = {
        "format": "tinkex-toy-1",
        "base_model": adapter.base_model,
        "lora": asdict(lora),
        "optimizer": adapter.optimizer,
        "step": adapter.step,
        DIGEST: content_of(arrays),
        "has_optimizer": job.with_optimizer,
        "has_gradients": job.with_gradients,
    }
    return arrays, {CONFIG: config, TOY_MANIFEST: manifest}


def content_of(arrays: Mapping[str, NDArray[Any]]) -> str:
    """The digest of an adapter's weights, which names them."""
    return hashlib.sha256(arrays["state"][:, 0].tobytes()).hexdigest()


def write(
    folder: Path,
    arrays: Mapping[str, NDArray[Any]],
    texts: Mapping[str, Mapping[str, Any]],
    *,
    ballast_bytes: int,
    sync: bool,
) -> jobs.AdapterResult:
    """Write what was captured, and as many zeros as a real adapter might have bytes."""

    def fill(aside: Path) -> None:
        np.savez(aside / ARRAYS, allow_pickle=False, **arrays)
        if ballast_bytes:
            np.zeros(ballast_bytes, np.uint8).tofile(aside / BALLAST)

    return jobs.AdapterResult(size_bytes=write_whole(folder, fill, texts, sync=sync))


def read(folder: Path, *, vocab_size: int, with_optimizer: bool, has_ballast: bool) -> ToyAdapter:
    if not (folder / TOY_MANIFEST).is_file():
        raise ModelNotFoundError(f"{folder.name} is no checkpoint: {TOY_MANIFEST} is missing")
    try:
        adapter = _read(folder, vocab_size=vocab_size, with_optimizer=with_optimizer)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, BadZipFile) as exc:
        if isinstance(exc, InvalidInputError):
            raise
        # The files may come from anybody, like those of the real engine.
        cause = f"{type(exc).__name__}: {str(exc)[:200]}"
        raise InvalidInputError(f"checkpoint {folder.name!r} is damaged: {cause}") from exc
    if has_ballast:
        pages = np.memmap(folder / BALLAST, np.uint8, mode="r")[::4096]
        if pages.any():  # touches them all: they are in memory then
            raise InvalidInputError(f"{BALLAST} of {folder.name} is damaged")
    return adapter


def _read(folder: Path, *, vocab_size: int, with_optimizer: bool) -> ToyAdapter:
    manifest = json.loads((folder / TOY_MANIFEST).read_text())
    if with_optimizer and not manifest["has_optimizer"]:
        raise InvalidInputError(
            f"checkpoint {folder.name!r} holds no optimizer state; load it without, or save "
            "with save_state"
        )
    lora, optimizer = jobs.LoraSpec(**manifest["lora"]), manifest["optimizer"]
    adapter = ToyAdapter(manifest["base_model"], vocab_size, lora, optimizer)
    with np.load(folder / ARRAYS) as file:
        arrays = dict(file)
        _check_digest(folder, manifest.get(DIGEST), content_of(arrays))
        adapter.load(
            arrays,
            with_optimizer=with_optimizer,
            with_gradients=manifest["has_gradients"],
        )
    return adapter


def _check_digest(folder: Path, claimed: Any, content: str) -> None:
    if claimed and claimed != content:
        raise InvalidInputError(
            f"checkpoint {folder.name!r} is damaged: its weights have the digest {content[:12]}, "
            f"but {claimed!s:.12} was written. Use another checkpoint, or bring its folder back "
            "from a backup."
        )
