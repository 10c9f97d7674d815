"""Write checkpoint folders; `format` says what is in them.

`capture` copies on the engine's thread, `write` runs on any other while training goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.checkpoint.format import (
    GRADIENTS,
    OPTIMIZER,
    PREFIX,
    STRETCH,
    THREADS,
    by_module,
    shard_ending,
    start_digest,
)
from tinkex.engine.checkpoint.peft_config import peft_config
from tinkex.engine.folders import CONFIG, DIGEST, MANIFEST, WEIGHTS, write_whole
from tinkex.engine.lora.adapter import Adapter, Target
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.optim.resident import ResidentAdapter

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""The names of number types in a safetensors header."""


@dataclass(frozen=True, slots=True)
class Written:
    """The size of a new folder, and the digest of the config and weights that went into it."""

    size_bytes: int
    content: str


@dataclass(frozen=True, slots=True)
class Image:
    """All that a folder will hold, as a copy: training may go on while it is written."""

    buffers: Mapping[str, Mapping[str, Tensor]]
    """By file name, then by the ending of its tensors' names; on the adapter's device."""
    adapter: Adapter
    """Whose layout the buffers have."""
    to_host: Callable[[Tensor], Tensor]
    """Gives a buffer on the host; waits for the copies alone, not for what was launched since."""
    texts: Mapping[str, Mapping[str, Any]]
    """JSON by file name; the manifest comes last."""


def capture(
    resident: ResidentAdapter,
    *,
    targets: Mapping[str, Target],
    base: Base | None,
    with_optimizer: bool,
    with_gradients: bool,
    ops: Ops,
    dtype: torch.dtype | None = None,
) -> Image:
    """Copy what `write` needs, on its device where that has room: the host's turn comes later.

    With `dtype` the weights are rounded to it, for a folder that only a sampler of it reads.
    """
    adapter, optimizer, grads = resident.adapter, resident.optimizer, resident.grads
    # Copies on the device: the engine waits for no disk, and training may change the originals.
    buffers = {WEIGHTS: {".weight": _copied(adapter.flat, dtype)}}
    if with_optimizer:
        moments = optimizer.moments.items()
        buffers[OPTIMIZER] = {f".{slot}": _copied(flat) for slot, flat in moments}
    if with_gradients and grads:
        buffers[GRADIENTS] = {shard_ending(shard): _copied(grad) for shard, grad in grads.items()}
    manifest = {
        "format": 1,
        "base_model": resident.base_model,
        "optimizer": optimizer.kind,
        "step": optimizer.step,
        "seed": resident.spec.seed,
        "has_optimizer": with_optimizer,
        "has_gradients": with_gradients,
        "zeros_left_out": True,
    }
    if base is not None:
        manifest |= {"base_fingerprint": base.fingerprint}
    texts = {CONFIG: peft_config(adapter, targets, resident.base_model), MANIFEST: manifest}
    return Image(buffers, adapter, ops.host_copier(), texts)


def write(folder: str | Path, image: Image, *, sync: bool = True) -> Written:
    """Write a checkpoint folder and give its size and digest; see `write_whole`."""
    texts = {name: dict(text) for name, text in image.texts.items()}
    content = start_digest(texts[CONFIG])

    def fill(aside: Path) -> None:
        for name, buffers in image.buffers.items():
            prefix = PREFIX if name == WEIGHTS else ""
            tensors = {
                f"{prefix}{module}{ending}": tensor
                for ending, flat in buffers.items()
                for module, tensor in by_module(image.adapter, image.to_host(flat))
                if name == WEIGHTS or tensor.any()  # zeros are not stored, see `_from_modules`
            }
            _save_tensors(aside / name, tensors, content if name == WEIGHTS else None)
        texts[MANIFEST][DIGEST] = content.hexdigest()

    size_bytes = write_whole(Path(folder), fill, texts, sync=sync)
    return Written(size_bytes, content.hexdigest())


def _copied(flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    try:
        return flat.detach().to(dtype or flat.dtype, copy=True)
    except torch.OutOfMemoryError:
        return flat.detach().to("cpu", dtype or flat.dtype, copy=True)


def _save_tensors(
    path: Path, tensors: Mapping[str, Tensor], content: hashlib._Hash | None = None
) -> None:
    """A safetensors file, written from where the tensors lie: its own library copies them twice."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        place = [at, at + size]
        header[name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": place,
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format wants its data aligned to eight bytes.
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    stretches = list(_stretches(map(_bytes_of, tensors.values())))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def save(parts: list[tuple[int, memoryview]]) -> bytes:
        digest = hashlib.sha256()
        for start, part in parts:
            _write_at(file, part, len(head) + start)
            if content is not None:
                digest.update(part)
        return digest.digest()

    try:
        _write_at(file, head, 0)
        with ThreadPoolExecutor(THREADS) as pool:
            digests = list(pool.map(save, stretches))
    finally:
        os.close(file)
    if content is not None:
        content.update(b"".join(digests) + text)
    path.chmod(0o644)


def _stretches(views: Iterable[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """Cut concatenated views into stretches of `STRETCH` bytes: (offset, bytes) of their parts.

    Each is written and hashed by a thread of its own: one alone takes a second a gigabyte.
    """
    parts: list[tuple[int, memoryview]] = []
    at = 0
    for view in views:
        while view:
            part = view[: STRETCH - at % STRETCH]
            parts.append((at, part))
            view, at = view[len(part) :], at + len(part)
            if at % STRETCH == 0:
                yield parts
                parts = []
    if parts:
        yield parts


def _bytes_of(tensor: Tensor) -> memoryview:
    data: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(data)


def _write_at(file: int, data: Any, at: int) -> None:
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(file, left, at)
        left, at = left[written:], at + written
