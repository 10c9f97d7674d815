"""Checkpoints: a PEFT folder, plus what bit-exact training on needs.

    adapter_config.json, adapter_model.safetensors   what `peft` and vLLM load
    optimizer.safetensors                            moments, by module (when asked for)
    gradients.safetensors                            gathered gradients (recovery snapshots)
    tinkex.json                                      manifest: what is in here, the step count, and
                                                     the hash that names the adapter's content

A folder is written aside, synced and renamed: it is there whole or not at all, and never changes.
Folders made by `peft` itself load too; what would change the arithmetic (DoRA, biases, whole
modules) is refused by name. Which adapter a folder belongs to, and who may read it, is not known.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.contract.models import MAX_RANK
from tinkex.contract.optimizers import find_optimizer
from tinkex.engine.folders import DIGEST, write_whole
from tinkex.engine.jobs import LoraSpec
from tinkex.engine.lora.adapter import (
    Adapter,
    LoraPart,
    ModuleInit,
    Target,
    build_adapter,
)
from tinkex.engine.lora.foreign_names import our_modules
from tinkex.engine.lora.patterns import ModulePatterns
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.optim.optimizer import OptimizerState
from tinkex.engine.optim.resident import ResidentAdapter
from tinkex.engine.optim.shards import NUM_SHARDS
from tinkex.engine.optim.updates import UPDATES
from tinkex.errors import InvalidInputError, ModelNotFoundError, NotSupportedError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OPTIMIZER, _GRADIENTS, _MANIFEST = "optimizer.safetensors", "gradients.safetensors", "tinkex.json"
_PREFIX = "base_model.model."
FORCE = (
    "Serve the base it was trained on, or start the server with --any-base (TINKEX_ANY_BASE=1) to "
    "use it all the same."
)
_WRITERS = min(8, os.cpu_count() or 1)
_STRETCH = 8 << 20
"""Bytes of a file that one thread writes, and whose hash is part of the whole one's."""
_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class Stored:
    """The contents of a folder. `optimizer` is None where it held none or none was asked."""

    adapter: Adapter
    spec: LoraSpec
    optimizer_kind: str | None
    optimizer: OptimizerState | None
    grads: Mapping[int, Tensor]
    content: str
    """The digest of its config and weights, computed from the bytes that were read."""


@dataclass(frozen=True, slots=True)
class Written:
    """The size of a new folder, and the digest of the config and weights that went into it."""

    size_bytes: int
    content: str


# ---------------------------------------------------------------------------------------- writing


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
    buffers = {_WEIGHTS: {".weight": _copied(adapter.flat, dtype)}}
    if with_optimizer:
        moments = optimizer.moments.items()
        buffers[_OPTIMIZER] = {f".{slot}": _copied(flat) for slot, flat in moments}
    if with_gradients and grads:
        buffers[_GRADIENTS] = {_shard_ending(shard): _copied(grad) for shard, grad in grads.items()}
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
    texts = {_CONFIG: _peft_config(adapter, targets, resident.base_model), _MANIFEST: manifest}
    return Image(buffers, adapter, ops.host_copier(), texts)


def write(folder: str | Path, image: Image, *, sync: bool = True) -> Written:
    """Write a checkpoint folder and give its size and digest; see `write_whole`."""
    texts = {name: dict(text) for name, text in image.texts.items()}
    content = _content_hash(texts[_CONFIG])

    def fill(aside: Path) -> None:
        for name, buffers in image.buffers.items():
            prefix = _PREFIX if name == _WEIGHTS else ""
            tensors = {
                f"{prefix}{module}{ending}": tensor
                for ending, flat in buffers.items()
                for module, tensor in _named(image.adapter, image.to_host(flat))
                if name == _WEIGHTS or tensor.any()  # zeros are not stored, see `_unname`
            }
            _save_tensors(aside / name, tensors, content if name == _WEIGHTS else None)
        texts[_MANIFEST][DIGEST] = content.hexdigest()

    size_bytes = write_whole(Path(folder), fill, texts, sync=sync)
    return Written(size_bytes, content.hexdigest())


def _shard_ending(shard: int) -> str:
    """Of the names of a virtual shard's gradients; most have only the first."""
    return f".shard{shard}" if shard else ""


def _copied(flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    try:
        return flat.detach().to(dtype or flat.dtype, copy=True)
    except torch.OutOfMemoryError:
        return flat.detach().to("cpu", dtype or flat.dtype, copy=True)


def _named(adapter: Adapter, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A buffer of the adapter's layout, taken apart by module."""
    tensors, at = adapter.views(flat), 0
    for group in adapter.groups.values():
        for index, part in enumerate(group.parts):
            a_RI, b_Or = tensors[at], tensors[at + 1 + index]
            yield f"{part.target.module}.lora_A", a_RI[part.row : part.row + part.rank]
            yield f"{part.target.module}.lora_B", b_Or
        at += 1 + len(group.parts)


def _content_hash(config: Mapping[str, Any]) -> hashlib._Hash:
    """The name of an adapter's content, begun: what it does depends on its scales as well."""
    try:
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    except RecursionError as exc:  # writing takes more of the stack than reading took
        raise InvalidInputError(
            f"{_CONFIG} cannot be read: its values are nested too deep"
        ) from exc


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
        with ThreadPoolExecutor(_WRITERS) as pool:
            digests = list(pool.map(save, stretches))
    finally:
        os.close(file)
    if content is not None:
        content.update(b"".join(digests) + text)
    path.chmod(0o644)


def _stretches(views: Iterable[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """Cut concatenated views into stretches of `_STRETCH` bytes: (offset, bytes) of their parts.

    Each is written and hashed by a thread of its own: one alone takes a second a gigabyte.
    """
    parts: list[tuple[int, memoryview]] = []
    at = 0
    for view in views:
        while view:
            part = view[: _STRETCH - at % _STRETCH]
            parts.append((at, part))
            view, at = view[len(part) :], at + len(part)
            if at % _STRETCH == 0:
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


def _peft_config(
    adapter: Adapter, targets: Mapping[str, Target], base_model: str
) -> dict[str, Any]:
    """The config by which `peft` rebuilds the adapter, with patterns where modules differ."""
    parts = [part for part, _, _ in adapter.modules()]
    rank = max((part.rank for part in parts), default=1)
    first = next((part for part in parts if part.rank == rank), None)
    alpha = _alpha(first) if first is not None else 1.0
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "target_modules": _target_modules(parts, targets),
        "rank_pattern": {p.target.module: p.rank for p in parts if p.rank != rank},
        "alpha_pattern": {p.target.module: _alpha(p) for p in parts if _alpha(p) != alpha},
    }


def _alpha(part: LoraPart) -> float:
    alpha = part.scale * part.rank
    return round(alpha) if abs(alpha - round(alpha)) < 1e-6 else alpha


def _target_modules(parts: Sequence[LoraPart], targets: Mapping[str, Target]) -> list[str]:
    """Short names (`q_proj`) when every module of that name carries the adapter, else full ones."""
    mine = {part.target.module for part in parts}
    leaves = {module.rpartition(".")[2] for module in mine}
    everywhere = {
        part.module
        for target in targets.values()
        for part in target.parts
        if part.module.rpartition(".")[2] in leaves
    }
    return sorted(leaves) if everywhere == mine else sorted(mine)


# ---------------------------------------------------------------------------------------- reading


def read(
    folder: str | Path,
    targets: Mapping[str, Target],
    device: torch.device | str,
    *,
    with_optimizer: bool,
    base: Base | None = None,
) -> Stored:
    """Read a checkpoint folder, ours or one that `peft` wrote, to be used on `base`.

    Raises:
        WrongBaseError: It was trained on other weights than those of `base`.
        ModelNotFoundError: There is no such folder, or it holds no adapter.
        InvalidInputError: The adapter does not fit the base model, lacks what was asked for, or
            is not what its manifest says was written.
    """
    path = Path(folder)
    if not (path / _CONFIG).is_file() or not (path / _WEIGHTS).is_file():
        raise ModelNotFoundError(
            f"{path.name} is no checkpoint: it lacks {_CONFIG} or {_WEIGHTS} (safetensors)."
        )
    config = _load_json(path / _CONFIG)
    manifest = _read_manifest(path)
    if base is not None:
        base.check(manifest, path.name, force=FORCE)
    modules, content = _read_modules(path, config, manifest.get(DIGEST))
    adapter = build_adapter(targets, modules, device)
    kind: str | None = manifest.get("optimizer")
    if kind is not None:
        find_optimizer(kind, f"{path.name}/{_MANIFEST}")
    optimizer = None
    if with_optimizer:
        if not manifest.get("has_optimizer") or kind is None:
            raise InvalidInputError(
                f"{path.name} was saved without optimizer state. Load it without the optimizer, or "
                "save with save_state, which keeps it."
            )
        optimizer = _read_optimizer(path, adapter, kind, manifest)
    grads: dict[int, Tensor] = {}
    if manifest.get("has_gradients") and (path / _GRADIENTS).is_file():
        stored = _load_tensors(path / _GRADIENTS)
        for shard in range(NUM_SHARDS):
            # Either side may be left out: a fresh adapter's A has no gradient yet.
            endings = tuple(f".lora_{side}{_shard_ending(shard)}" for side in "AB")
            if any(name.endswith(endings) for name in stored):
                grads[shard] = _unname(adapter, stored, _shard_ending(shard), manifest)
    return Stored(adapter, _spec(adapter, manifest), kind, optimizer, grads, content)


def content_of(folder: str | Path) -> str:
    """The digest of a folder's config and weights, computed from their bytes.

    Whatever the manifest says: a folder may come from anyone, and the digest decides whose keys
    and values are shared.
    """
    path = Path(folder)
    return _digest(_load_json(path / _CONFIG), _read_bytes(path / _WEIGHTS))


def renew_digest(folder: str | Path) -> None:
    """Name the digest of the files as they are now, after they were rewritten on purpose."""
    path = Path(folder)
    manifest = _read_manifest(path)
    if DIGEST in manifest:
        manifest[DIGEST] = content_of(path)
        (path / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _digest(config: Mapping[str, Any], weights: bytes) -> str:
    """The digest of a config and of the bytes of a safetensors file, as `write` computes it."""
    content, start = _content_hash(config), _data_start(weights)
    view = memoryview(weights)
    stretches = [view[at : at + _STRETCH] for at in range(start, len(view), _STRETCH)]
    if len(stretches) > 1:
        with ThreadPoolExecutor(_WRITERS) as pool:
            digests = list(pool.map(_sha256, stretches))
    else:
        digests = list(map(_sha256, stretches))
    content.update(b"".join(digests))
    content.update(view[8:start])
    return content.hexdigest()


def _data_start(weights: bytes) -> int:
    return min(8 + int.from_bytes(weights[:8], "little"), len(weights))


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _check_digest(path: Path, claimed: Any, content: str) -> None:
    """Refuse a folder whose manifest names other content than the bytes that were read."""
    if not claimed or claimed == content:
        return
    raise InvalidInputError(
        f"checkpoint {path.name!r} is damaged: {_CONFIG} and {_WEIGHTS} have the digest "
        f"{content[:12]}, but {claimed!s:.12} was written. Use another checkpoint, or bring its "
        "folder back from a backup; an adapter that was changed on purpose has to be imported."
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        return {}
    manifest = _load_json(file)
    if manifest.get("format") != 1:
        raise NotSupportedError(
            f"{file.name} has format {manifest.get('format')!r}; this version reads format 1"
        )
    return manifest


def _check_peft_config(config: Mapping[str, Any]) -> None:
    plain = {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False}
    for key, value in plain.items():
        if config.get(key, value) != value:
            raise NotSupportedError(
                f"the adapter has {key} = {config[key]!r}; only {value!r} is supported",
                path=_CONFIG,
            )
    empty = ("modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias")
    for key in (*empty, "megatron_config", "corda_config", "eva_config"):
        if config.get(key):
            raise NotSupportedError(f"the adapter uses {key}, which is not supported", path=_CONFIG)


def _read_modules(
    path: Path, config: Mapping[str, Any], claimed: Any
) -> tuple[dict[str, ModuleInit], str]:
    """The matrices by module, and the digest of the very bytes they were made from."""
    _check_peft_config(config)
    weights = _read_bytes(path / _WEIGHTS)
    modules = _modules(_parse_tensors(weights), config)
    content = _digest(config, weights)
    _check_digest(path, claimed, content)
    return modules, content


def _modules(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, ModuleInit]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if (match := _KEY.fullmatch(key)) is None:
            raise NotSupportedError(f"{_WEIGHTS} holds {key[:120]!r}, which is no LoRA matrix")
        sides.setdefault(match["module"], {})[match["side"]] = tensor.float()
    if not sides:
        raise InvalidInputError(f"{_WEIGHTS} holds no LoRA matrix")
    modules: dict[str, ModuleInit] = {}
    alphas = ModulePatterns(config.get("alpha_pattern"), field="alpha_pattern")
    for module, pair in our_modules(sides).items():
        if set(pair) != {"A", "B"}:
            raise InvalidInputError(f"{_WEIGHTS} holds only half of {module[:120]!r}")
        rank = pair["A"].shape[0] if pair["A"].ndim == 2 else 0
        if not 1 <= rank <= MAX_RANK:
            raise InvalidInputError(
                f"LoRA A of {module!r} has shape {tuple(pair['A'].shape)}; it must be 2-D with a "
                f"rank of 1 to {MAX_RANK}"
            )
        alpha = alphas.get(module, config.get("lora_alpha", 8))
        modules[module] = ModuleInit(rank, _scale(config, alpha, rank), pair["A"], pair["B"])
    return modules


def _scale(config: Mapping[str, Any], alpha: Any, rank: int) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise InvalidInputError(f"lora_alpha must be a number, got {alpha!r}", path=_CONFIG)
    root = rank**0.5 if config.get("use_rslora") else rank
    return alpha / root


def _spec(adapter: Adapter, manifest: Mapping[str, Any]) -> LoraSpec:
    parts = [part for part, _, _ in adapter.modules()]
    kinds = {part.target.kind for part in parts}
    rank = max(part.rank for part in parts)
    return LoraSpec(
        rank=rank,
        alpha=next(float(_alpha(part)) for part in parts if part.rank == rank),
        seed=manifest.get("seed"),
        train_attn="attn" in kinds,
        train_mlp="mlp" in kinds,
        train_unembed="unembed" in kinds,
    )


def _read_optimizer(
    path: Path, adapter: Adapter, kind: str, manifest: Mapping[str, Any]
) -> OptimizerState:
    stored = _load_tensors(path / _OPTIMIZER)
    slots = UPDATES[kind].moments
    moments = {slot: _unname(adapter, stored, f".{slot}", manifest) for slot in slots}
    return OptimizerState(kind, int(manifest["step"]), moments)


def _unname(
    adapter: Adapter, stored: Mapping[str, Tensor], suffix: str, manifest: Mapping[str, Any]
) -> Tensor:
    """The inverse of `_named`: tensors by module, put together in a buffer.

    A tensor that is not there was all zeros, if the manifest says that such are left out.
    """
    flat = torch.zeros_like(adapter.flat)
    for name, place in _named(adapter, flat):
        found = stored.get(f"{name}{suffix}")
        if found is None and not manifest.get("zeros_left_out"):
            raise InvalidInputError(f"the checkpoint holds no state for '{name}{suffix}'")
        if found is None:
            continue
        if found.shape != place.shape:
            raise InvalidInputError(
                f"optimizer state of {name!r} has shape {tuple(found.shape)}, "
                f"the weights have {tuple(place.shape)}"
            )
        place.copy_(found)
    return flat


def _load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as exc:
        raise InvalidInputError(f"{path.name} cannot be read: {_cause(exc)}") from exc
    if not isinstance(value, dict):
        raise InvalidInputError(f"{path.name} must hold a JSON object")
    return value


def _cause(exc: Exception) -> str:
    """Why a file cannot be read, without saying where it lies: the text goes to a client."""
    return str(getattr(exc, "strerror", None) or exc)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidInputError(f"{path.name} cannot be read: {_cause(exc)}") from exc


def _parse_tensors(weights: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file that was read whole: what is hashed is what is used."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(weights)
    except (SafetensorError, KeyError) as exc:  # a kind of number that torch has not
        raise InvalidInputError(f"{_WEIGHTS} cannot be read: {_cause(exc)}") from exc
    return tensors


def _load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as exc:
        raise InvalidInputError(f"{path.name} cannot be read: {_cause(exc)}") from exc
    return tensors
