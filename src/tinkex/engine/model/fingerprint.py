"""Say in sixteen characters which weights a base model has, and refuse checkpoints of others.

A LoRA adapter means something only on the weights it was trained on: on others of the same shape it
loads without complaint and answers differently. So every checkpoint carries the fingerprint of its
base, and whoever uses one compares.

A fingerprint is a hash of the name, the shape and 256 evenly spread values, as float32, of every
tensor. Equal tensors have equal fingerprints however they are stored: one file or shards, bf16 or
float32, safetensors or GGUF. It is noted while a model is loaded (`Witness`), which reads every
tensor anyway, and kept in the cache folder until a file changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.default_model import cache_dir
from tinkex.engine.model.weights import (
    SafetensorsWeights,
    WeightReader,
    expected_shapes,
    open_weights,
)
from tinkex.engine.numerics.mxfp4 import PackedExperts
from tinkex.errors import WrongBaseError

log = logging.getLogger(__name__)
_VALUES = 256
_LENGTH = 16
_FIELD = "base_fingerprint"
TELL_EVERY_S = 2.0


def digest(name: str, tensor: Tensor) -> bytes:
    """The digest of one tensor in a fingerprint."""
    count = min(_VALUES, tensor.numel())
    at = torch.arange(count, device=tensor.device) * (tensor.numel() // max(count, 1))
    values = tensor[torch.unravel_index(at, tensor.shape)] if tensor.ndim else tensor.reshape(1)
    head = f"{name}:{tuple(tensor.shape)}:".encode()
    return hashlib.sha256(head + values.detach().float().cpu().numpy().tobytes()).digest()


class Witness(WeightReader):
    """A `WeightReader` that takes note of the tensors it hands on."""

    def __init__(
        self, reader: WeightReader, num_all: int = 0, tell: Callable[[int], None] | None = None
    ) -> None:
        """`tell` hears now and then how many percent of `num_all` numbers were read."""
        self._reader, self._num_all, self._tell = reader, num_all, tell
        self._seen: dict[str, bytes] = {}
        self._num_read = 0
        self._told, self._told_at = 0, time.monotonic()

    def names(self) -> Iterator[str]:
        return self._reader.names()

    def read(self, name: str) -> Tensor:
        tensor = self._reader.read(name)
        if name not in self._seen:
            self._seen[name] = digest(name, tensor)
            self._num_read += tensor.numel()
            if self._tell is not None:
                self._tell_percent(self._tell)
        return tensor

    @property
    def in_mxfp4(self) -> bool:
        return self._reader.in_mxfp4

    def packed(self, name: str, dtype: torch.dtype) -> PackedExperts | None:
        """Not noted: to expand them would take longer than to load them; see `fingerprint`."""
        return self._reader.packed(name, dtype)

    def _tell_percent(self, tell: Callable[[int], None]) -> None:
        """In steps of ten, a few seconds apart: most models are there before the first."""
        percent, now = 100 * self._num_read // self._num_all, time.monotonic()
        if percent >= self._told + 10 and now - self._told_at >= TELL_EVERY_S:
            self._told, self._told_at = percent, now
            tell(min(percent, 100))

    def fingerprint(self, names: Iterator[str]) -> str:
        """Of the tensors `names`; those that nobody asked for yet are read now."""
        whole = hashlib.sha256()
        for name in sorted(names):
            if name not in self._seen:
                packed = self._reader.packed(name, torch.bfloat16)
                tensor = self._reader.read(name) if packed is None else packed.expanded()
                self._seen[name] = digest(name, tensor)
            whole.update(self._seen[name])
        return whole.hexdigest()[:_LENGTH]


def witness_of(source: ModelSource, tell: Callable[[int], None] | None = None) -> Witness | None:
    """A reader for our own decoder; None for models that transformers loads by itself.

    `tell` hears, now and then, how many percent of the model are read.
    """
    config = source.config()
    if not config.native:
        return None
    num_all = sum(math.prod(shape) for _, shape in expected_shapes(config))
    return Witness(open_weights(source, config), num_all, tell)


def fingerprint(source: ModelSource, witness: Witness | None = None) -> str:
    """That of the weights at `source`: from the cache, from a witness, or read now."""
    stamp, kept = _stamp(source), _kept_at(source)
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(kept.read_text())
        if known["stamp"] == stamp:
            return str(known["fingerprint"])
    found = _computed(source, witness)
    _keep(kept, {"stamp": stamp, "fingerprint": found, "path": str(source.path)})
    return found


def _computed(source: ModelSource, witness: Witness | None) -> str:
    config = source.config()
    if config.native:
        reader = witness or Witness(open_weights(source, config))
        return reader.fingerprint(name for name, _ in expected_shapes(config))
    files = Witness(SafetensorsWeights(source.path))
    return files.fingerprint(files.names())


def _stamp(source: ModelSource) -> list[list[Any]]:
    """Changes whenever a weight file does."""
    path = source.path
    files = sorted(path.glob("*.safetensors*")) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _kept_at(source: ModelSource) -> Path:
    key = hashlib.sha256(os.fsencode(source.path.resolve())).hexdigest()[:32]
    return cache_dir() / "fingerprints" / f"{key}.json"


def _keep(file: Path, value: Mapping[str, Any]) -> None:
    """Best effort: without a cache a fingerprint is computed again."""
    aside = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(value))
        os.replace(aside, file)


# ------------------------------------------------------------------------------------ comparing


@dataclass(frozen=True, slots=True)
class Base:
    """The base model that checkpoints are used on."""

    name: str
    fingerprint: str
    any_base: bool = False
    """Warn about checkpoints of another base instead of refusing them."""

    def check(self, manifest: Mapping[str, Any], checkpoint: str, *, force: str) -> None:
        """Refuse a checkpoint of other weights. One that carries no fingerprint is taken.

        Args:
            force: How the caller's user can use it all the same, for the message.

        Raises:
            WrongBaseError: The checkpoint was trained on another base.
        """
        theirs = manifest.get(_FIELD)
        if not isinstance(theirs, str):
            if manifest:  # a folder that peft wrote has no manifest, and promises nothing
                log.warning(
                    "%s does not say on which base weights it was trained (it was saved by an "
                    "older version); it is used on %s, %s, unchecked.",
                    checkpoint,
                    self.name,
                    self.fingerprint,
                )
            return
        if theirs == self.fingerprint:
            return
        trained_on = str(manifest.get("base_model"))[:200]
        text = (
            f"{checkpoint} was trained on base weights {theirs[:_LENGTH]} ({trained_on}), and "
            f"{self.name} here has {self.fingerprint}. On other weights it would answer differently"
        )
        if not self.any_base:
            raise WrongBaseError(f"{text}. {force}")
        log.warning("%s; used all the same, as asked.", text)
