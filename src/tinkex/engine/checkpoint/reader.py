"""Read checkpoint folders, ours and those of `peft`; `format` says what is in them.

What would change the arithmetic (DoRA, biases, whole modules) is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.contract.models import MAX_RANK
from tinkex.contract.optimizers import find_optimizer
from tinkex.engine.checkpoint.format import (
    GRADIENTS,
    OPTIMIZER,
    STRETCH,
    THREADS,
    by_module,
    shard_ending,
    start_digest,
)
from tinkex.engine.checkpoint.peft_config import alpha_of, check_peft_config, scale_of
from tinkex.engine.folders import CONFIG, DIGEST, MANIFEST, WEIGHTS
from tinkex.engine.jobs import LoraSpec
from tinkex.engine.lora.adapter import (
    Adapter,
    ModuleInit,
    Target,
    build_adapter,
    check_modules,
    modules_of,
)
from tinkex.engine.lora.foreign_names import first_module, our_modules, our_name
from tinkex.engine.lora.patterns import ModulePatterns
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.optim.optimizer import OptimizerState
from tinkex.engine.optim.shards import NUM_SHARDS
from tinkex.engine.optim.updates import UPDATES
from tinkex.errors import InvalidInputError, ModelNotFoundError, NotSupportedError

FORCE = (
    "Serve the base it was trained on, or start the server with --any-base (TINKEX_ANY_BASE=1) to "
    "use it all the same."
)
HEADER_BYTES = 64 << 20
"""Of a file of weights: names and shapes."""
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
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise ModelNotFoundError(
            f"{path.name} is no checkpoint: it lacks {CONFIG} or {WEIGHTS} (safetensors)."
        )
    config = _load_json(path / CONFIG)
    manifest = _read_manifest(path)
    if base is not None:
        base.check(manifest, path.name, force=FORCE)
    _check_size(path / WEIGHTS, targets)
    modules, content = _read_modules(path, config, manifest.get(DIGEST), modules_of(targets))
    adapter = build_adapter(targets, modules, device)
    kind: str | None = manifest.get("optimizer")
    if kind is not None:
        find_optimizer(kind, f"{path.name}/{MANIFEST}")
    optimizer = None
    if with_optimizer:
        if not manifest.get("has_optimizer") or kind is None:
            raise InvalidInputError(
                f"{path.name} was saved without optimizer state. Load it without the optimizer, or "
                "save with save_state, which keeps it."
            )
        optimizer = _read_optimizer(path, adapter, kind, manifest)
    grads: dict[int, Tensor] = {}
    if manifest.get("has_gradients") and (path / GRADIENTS).is_file():
        endings = tuple(map(shard_ending, range(NUM_SHARDS)))
        stored = _load_tensors(path / GRADIENTS, _names(adapter, endings))
        for shard in range(NUM_SHARDS):
            # Either side may be left out: a fresh adapter's A has no gradient yet.
            sides = tuple(f".lora_{side}{endings[shard]}" for side in "AB")
            if any(name.endswith(sides) for name in stored):
                grads[shard] = _from_modules(adapter, stored, endings[shard], manifest)
    return Stored(adapter, _spec(adapter, manifest), kind, optimizer, grads, content)


def content_of(folder: str | Path) -> str:
    """The digest of a folder's config and weights, computed from their bytes.

    Whatever the manifest says: a folder may come from anyone, and the digest decides whose keys
    and values are shared.
    """
    path = Path(folder)
    return _digest(_load_json(path / CONFIG), _read_bytes(path / WEIGHTS))


def renew_digest(folder: str | Path) -> None:
    """Name the digest of the files as they are now, after they were rewritten on purpose."""
    path = Path(folder)
    manifest = _read_manifest(path)
    if DIGEST in manifest:
        manifest[DIGEST] = content_of(path)
        (path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _digest(config: Mapping[str, Any], weights: bytes) -> str:
    """The digest of a config and of the bytes of a safetensors file, as `write` computes it."""
    content, start = start_digest(config), _data_start(weights)
    view = memoryview(weights)
    stretches = [view[at : at + STRETCH] for at in range(start, len(view), STRETCH)]
    if len(stretches) > 1:
        with ThreadPoolExecutor(THREADS) as pool:
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
        f"checkpoint {path.name!r} is damaged: {CONFIG} and {WEIGHTS} have the digest "
        f"{content[:12]}, but {claimed!s:.12} was written. Use another checkpoint, or bring its "
        "folder back from a backup; an adapter that was changed on purpose has to be imported."
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        return {}
    manifest = _load_json(file)
    if manifest.get("format") != 1:
        raise NotSupportedError(
            f"{file.name} has format {manifest.get('format')!r}; this version reads format 1"
        )
    return manifest


def _check_size(file: Path, targets: Mapping[str, Target]) -> None:
    """Refuse a file that is larger than any adapter of the base model, before it is read."""
    sizes = [t.in_size + part.stop - part.start for t in targets.values() for part in t.parts]
    most = HEADER_BYTES + 8 * MAX_RANK * sum(sizes)  # in float64
    if (size := file.stat().st_size) > most:
        raise InvalidInputError(
            f"{file.name} has {size} bytes, and the largest adapter of this model {most}; export "
            "the adapter alone, without the model's own weights"
        )


def _read_modules(
    path: Path, config: Mapping[str, Any], claimed: Any, known: Set[str]
) -> tuple[dict[str, ModuleInit], str]:
    """The matrices by module, and the digest of the very bytes they were made from."""
    check_peft_config(config)
    # Read once: the bytes that are hashed are the bytes that are used.
    weights = _read_bytes(path / WEIGHTS)
    _check_names(weights, known)
    modules = _modules(_parse_tensors(weights), config, known)
    content = _digest(config, weights)
    _check_digest(path, claimed, content)
    return modules, content


def _check_names(weights: bytes, known: Set[str]) -> None:
    """Refuse names that are of no module of the base model, by the header alone.

    Whoever wrote the file chose how many tensors it names and how long the names are. Each costs
    time in which nobody else has a turn, so no tensor is made before all names are known.
    """
    try:
        header = json.loads(weights[8 : _data_start(weights)])
        keys = header.keys() - {"__metadata__"}
    except (ValueError, RecursionError, AttributeError) as exc:
        raise InvalidInputError(f"{WEIGHTS} cannot be read: {_cause(exc)}") from exc
    found = set()
    for key in keys:
        if (match := _KEY.fullmatch(key)) is None:
            raise NotSupportedError(f"{WEIGHTS} holds {key[:120]!r}, which is no LoRA matrix")
        module = our_name(match["module"])
        found.add(module if module in known else first_module(module))
    check_modules(found, known)


def _modules(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], known: Container[str]
) -> dict[str, ModuleInit]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        assert match is not None, key  # by `_check_names`
        sides.setdefault(match["module"], {})[match["side"]] = tensor.float()
    if not sides:
        raise InvalidInputError(f"{WEIGHTS} holds no LoRA matrix")
    modules: dict[str, ModuleInit] = {}
    alphas = ModulePatterns(config.get("alpha_pattern"), field="alpha_pattern")
    for module, pair in our_modules(sides, known).items():
        if set(pair) != {"A", "B"}:
            raise InvalidInputError(f"{WEIGHTS} holds only half of {module[:120]!r}")
        rank = pair["A"].shape[0] if pair["A"].ndim == 2 else 0
        if not 1 <= rank <= MAX_RANK:
            raise InvalidInputError(
                f"LoRA A of {module!r} has shape {tuple(pair['A'].shape)}; it must be 2-D with a "
                f"rank of 1 to {MAX_RANK}"
            )
        alpha = alphas.get(module, config.get("lora_alpha", 8))
        modules[module] = ModuleInit(rank, scale_of(config, alpha, rank), pair["A"], pair["B"])
    return modules


def _spec(adapter: Adapter, manifest: Mapping[str, Any]) -> LoraSpec:
    parts = [part for part, _, _ in adapter.modules()]
    kinds = {part.target.kind for part in parts}
    rank = max(part.rank for part in parts)
    return LoraSpec(
        rank=rank,
        alpha=next(float(alpha_of(part)) for part in parts if part.rank == rank),
        seed=manifest.get("seed"),
        train_attn="attn" in kinds,
        train_mlp="mlp" in kinds,
        train_unembed="unembed" in kinds,
    )


def _read_optimizer(
    path: Path, adapter: Adapter, kind: str, manifest: Mapping[str, Any]
) -> OptimizerState:
    endings = {slot: f".{slot}" for slot in UPDATES[kind].moments}
    stored = _load_tensors(path / OPTIMIZER, _names(adapter, endings.values()))
    moments = {
        slot: _from_modules(adapter, stored, ending, manifest) for slot, ending in endings.items()
    }
    return OptimizerState(kind, int(manifest["step"]), moments)


def _names(adapter: Adapter, endings: Iterable[str]) -> set[str]:
    """The names of tensors that `by_module` gives, with each of the endings."""
    endings = tuple(endings)
    return {name + end for name, _ in by_module(adapter, adapter.flat) for end in endings}


def _from_modules(
    adapter: Adapter, stored: Mapping[str, Tensor], suffix: str, manifest: Mapping[str, Any]
) -> Tensor:
    """The inverse of `by_module`: tensors by module, put together in a buffer.

    A tensor that is not there was all zeros, if the manifest says that such are left out.
    """
    flat = torch.zeros_like(adapter.flat)
    for name, view in by_module(adapter, flat):
        tensor = stored.get(f"{name}{suffix}")
        if tensor is None and not manifest.get("zeros_left_out"):
            raise InvalidInputError(f"the checkpoint holds no state for '{name}{suffix}'")
        if tensor is None:
            continue
        if tensor.shape != view.shape:
            raise InvalidInputError(
                f"optimizer state of {name!r} has shape {tuple(tensor.shape)}, "
                f"the weights have {tuple(view.shape)}"
            )
        view.copy_(tensor)
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
        raise InvalidInputError(f"{WEIGHTS} cannot be read: {_cause(exc)}") from exc
    return tensors


def _load_tensors(path: Path, names: Container[str]) -> dict[str, Tensor]:
    """The tensors of these names that a file has; others in it cost nothing."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name in names}
    except (SafetensorError, OSError, KeyError) as exc:  # a kind of number that torch has not
        raise InvalidInputError(f"{path.name} cannot be read: {_cause(exc)}") from exc
