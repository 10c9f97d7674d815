"""Fold a PEFT LoRA adapter into its base model and write an ordinary Hugging Face folder.

Works on the files, shard by shard, in float32, and writes each tensor in the base's own dtype. A
model whose head shares the input embedding is untied first when the adapter touches the head:
adding the head's delta to the shared matrix would change what every input token means. Experts are
found however the base stores them: one by one, under Mixtral's names, or fused. Adapters
that a plain sum cannot express (DoRA, extra trained modules) are refused by name.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.engine.folders import CONFIG, MANIFEST, WEIGHTS
from tinkex.engine.lora.patterns import ModulePatterns
from tinkex.errors import InvalidInputError, NotSupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["Merged", "merge_adapter"]

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_PREFIX = "base_model.model."
_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_FORCE = "Name its own base (--base), or merge all the same with --any-base."
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    folder: Path
    base: Path
    num_merged: int
    """Matrices that got a delta."""
    untied: bool
    """The head was separated from the input embedding."""


def merge_adapter(
    adapter: str | Path,
    output: str | Path,
    base: str | Path | None = None,
    *,
    any_base: bool = False,
) -> Merged:
    """Write `base` + `adapter` to the folder `output`, which must be absent or empty.

    `base` is a model name or folder; by default the one the adapter names. With `any_base` an
    adapter that was trained on other weights is merged too, with a warning.

    Raises:
        WrongBaseError: The adapter says that it was trained on other weights than those of `base`.
    """
    from tinkex.engine.model.base_model import resolve
    from tinkex.engine.model.fingerprint import Base, fingerprint

    adapter, output = Path(adapter), Path(output)
    if output.exists() and any(output.iterdir()):
        raise InvalidInputError(f"{output} exists and is not empty. Name another folder.")
    config = _read_json(adapter / CONFIG)
    _check(config)
    model = resolve(str(base or config["base_model_name_or_path"]))
    source = Path(model.path)
    if not source.is_dir():
        raise NotSupportedError(
            f"{source} is not a folder with safetensors; merging needs the base as such a folder."
        )
    deltas = _Deltas(adapter, config, _model_type(source))
    manifest = adapter / MANIFEST
    if manifest.is_file():
        # Adapters of ours name the weights they were trained on; a foreign one says nothing.
        trained_on = Base(model.name, fingerprint(model), any_base)
        trained_on.check(_read_json(manifest), "The checkpoint", force=_FORCE)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".merging-") as scratch:
        aside = Path(scratch) / "model"
        aside.mkdir()
        untied = _write_weights(source, aside, deltas)
        if left := deltas.unused():
            raise InvalidInputError(f"The adapter changes {left[0]}, which {source} does not have.")
        _write_side_files(source, aside, untied=untied)
        aside.rename(output)  # Whole or not at all.
    return Merged(folder=output, base=source, num_merged=deltas.num_used, untied=untied)


class _Deltas:
    """The adapter's B @ A products, by the name of the base tensor they belong to."""

    def __init__(self, folder: Path, config: Mapping[str, Any], model_type: str) -> None:
        from safetensors.torch import load_file

        from tinkex.engine.lora.foreign_names import our_modules

        self._config, self._model_type = config, model_type
        self._ranks = ModulePatterns(config.get("rank_pattern"), field="rank_pattern")
        self._alphas = ModulePatterns(config.get("alpha_pattern"), field="alpha_pattern")
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        self._used: set[str] = set()
        for name, tensor in load_file(folder / WEIGHTS).items():
            module, _, rest = name.removeprefix(_PREFIX).partition(".lora_")
            if rest not in ("A.weight", "B.weight"):
                raise NotSupportedError(
                    f"The adapter holds {name}; only linear LoRA can be merged."
                )
            pairs.setdefault(module, {})[rest[0]] = tensor.float()
        self._pairs = {f"{module}.weight": pair for module, pair in our_modules(pairs).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._pairs

    @property
    def num_used(self) -> int:
        return len(self._used)

    def unused(self) -> list[str]:
        return sorted(set(self._pairs) - self._used)

    def merged(self, stored: str, base: torch.Tensor) -> torch.Tensor:
        """A tensor of the base by its own name, with whatever the adapter adds to it."""
        from tinkex.engine.lora.foreign_names import our_name
        from tinkex.engine.model.published import text_names

        for name in text_names(iter([stored])):
            if (match := _FUSED.fullmatch(name)) is not None:
                return self._add_fused(match[1], match[2], base)
            name = f"{our_name(name.removesuffix('.weight'))}.weight"
            if name in self._pairs:
                return self.add(name, base)
        return base

    def _add_fused(self, block: str, leaf: str, base: torch.Tensor) -> torch.Tensor:
        """Experts in one tensor: [E, out, in], or gpt_oss's [E, in, out] with gate and up
        interleaved."""
        is_interleaved = self._model_type == "gpt_oss"
        leaves = ("down_proj",) if leaf == "down_proj" else ("gate_proj", "up_proj")
        whole = base.float()
        for expert in range(len(base)):
            # A view, so that adding to it changes `whole`.
            rows = whole[expert].T if is_interleaved else whole[expert]
            for index, part in enumerate(leaves):
                name = f"{block}.{expert}.{part}.weight"
                if name not in self._pairs:
                    continue
                size = len(rows) // len(leaves)
                span = (
                    slice(index, None, len(leaves))
                    if is_interleaved
                    else slice(index * size, (index + 1) * size)
                )
                rows[span] += self._delta(name, tuple(rows[span].shape))
        return whole.to(base.dtype)

    def add(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """`base` with its delta, in the dtype of `base`."""
        return (base.float() + self._delta(name, tuple(base.shape))).to(base.dtype)

    def _delta(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._used.add(name)
        pair = self._pairs[name]
        delta = (pair["B"] @ pair["A"]) * self._scale(name.removesuffix(".weight"))
        if self._config.get("fan_in_fan_out"):  # GPT-2's Conv1D stores [in, out].
            delta = delta.T
        if delta.shape != shape:
            raise InvalidInputError(
                f"{name} has shape {list(shape)} in the base and {list(delta.shape)} in the "
                "adapter. The adapter belongs to another model."
            )
        return delta

    def _scale(self, module: str) -> float:
        rank = float(self._ranks.get(module, self._config["r"]))
        alpha = float(self._alphas.get(module, self._config["lora_alpha"]))
        # Rank-stabilized LoRA (arXiv 2312.03732) divides by the root of the rank.
        return float(alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank))


def _model_type(source: Path) -> str:
    """The kind of model in a folder, refusing packed weights: nothing can be added to them."""
    from tinkex.engine.model.published import quantization_of

    config = _read_json(source / "config.json")
    if (packing := quantization_of(config)) is not None:
        raise NotSupportedError(
            f"{source} holds {packing} weights, to which nothing can be added. Merge into the "
            "unquantized checkpoint."
        )
    return str((config.get("text_config") or config).get("model_type"))


def _check(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise NotSupportedError(
            f"peft_type {config.get('peft_type')!r} cannot be merged, only LORA."
        )
    for name in ("use_dora", "modules_to_save", "trainable_token_indices"):
        if config.get(name):
            raise NotSupportedError(
                f"An adapter with {name}={config[name]!r} cannot be merged here."
            )


def _write_weights(source: Path, output: Path, deltas: _Deltas) -> bool:
    """Copy every shard with its deltas added; says whether the head was untied."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    tied = bool(_read_json(source / "config.json").get("tie_word_embeddings"))
    # Some models are tied by their class alone: the config is silent and no head is stored.
    untie = _HEAD in deltas and (tied or _HEAD not in set(_names(source)))
    index: dict[str, str] = {}
    for shard in _shards(source):
        with safe_open(shard, framework="pt") as file:
            tensors = {}
            for name in list(file.keys()):
                base = file.get_tensor(name)
                if name == _HEAD and untie:
                    continue  # A stored copy of the embedding; the merged head replaces it.
                tensors[name] = deltas.merged(name, base)
                if name in _EMBEDDINGS and untie:
                    tensors[_HEAD] = deltas.add(_HEAD, base.clone())
        (output / shard.name).touch()  # for its mode, which follows the umask
        mode = (output / shard.name).stat().st_mode
        save_file(tensors, output / shard.name, metadata={"format": "pt"})
        (output / shard.name).chmod(mode)  # safetensors writes files for their owner alone
        index |= dict.fromkeys(tensors, shard.name)
    if len(set(index.values())) > 1:
        size = sum(shard.stat().st_size for shard in output.glob("*.safetensors"))
        _write_json(
            output / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": index},
        )
    return untie


def _write_side_files(source: Path, output: Path, *, untied: bool) -> None:
    for pattern in _SIDE_FILES:
        for file in source.glob(pattern):
            if file.name != "model.safetensors.index.json":  # written with the weights
                shutil.copyfile(file, output / file.name)
    if untied:
        config = _read_json(source / "config.json")
        _write_json(output / "config.json", {**config, "tie_word_embeddings": False})


def _shards(folder: Path) -> list[Path]:
    if not (shards := sorted(folder.glob("*.safetensors"))):
        raise InvalidInputError(f"{folder} holds no .safetensors file.")
    return shards


def _names(folder: Path) -> Iterator[str]:
    from safetensors import safe_open

    for shard in _shards(folder):
        with safe_open(shard, framework="pt") as file:
            yield from file.keys()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InvalidInputError(f"{path} cannot be read: {exc}") from exc
    return dict(value)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
