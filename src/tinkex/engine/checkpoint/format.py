"""The form of a checkpoint folder: a PEFT folder, plus what bit-exact training on needs.

    adapter_config.json, adapter_model.safetensors   what `peft` and vLLM load
    optimizer.safetensors                            moments, by module (when asked for)
    gradients.safetensors                            gathered gradients (recovery snapshots)
    tinkex.json                                      manifest: what is in here, the step count, and
                                                     the hash that names the adapter's content

A folder is written aside, synced and renamed: it is there whole or not at all, and never changes.
Which adapter a folder belongs to, and who may read it, is not known here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from tinkex.engine.folders import CONFIG
from tinkex.engine.lora.adapter import Adapter
from tinkex.errors import InvalidInputError

OPTIMIZER, GRADIENTS = "optimizer.safetensors", "gradients.safetensors"
PREFIX = "base_model.model."
"""PEFT's, in front of the names of weights."""
STRETCH = 8 << 20
"""Bytes of a file that one thread reads or writes, and whose hash is part of the whole one's. A
constant: another number gives other digests."""
THREADS = min(8, os.cpu_count() or 1)


def shard_ending(shard: int) -> str:
    """Of the names of a virtual shard's gradients; most have only the first."""
    return f".shard{shard}" if shard else ""


def by_module(adapter: Adapter, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A buffer of the adapter's layout, taken apart by module."""
    tensors, at = adapter.views(flat), 0
    for group in adapter.groups.values():
        for index, part in enumerate(group.parts):
            a_RI, b_Or = tensors[at], tensors[at + 1 + index]
            yield f"{part.target.module}.lora_A", a_RI[part.row : part.row + part.rank]
            yield f"{part.target.module}.lora_B", b_Or
        at += 1 + len(group.parts)


def start_digest(config: Mapping[str, Any]) -> hashlib._Hash:
    """The name of an adapter's content, begun: what it does depends on its scales as well."""
    try:
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    except RecursionError as exc:  # writing takes more of the stack than reading took
        raise InvalidInputError(f"{CONFIG} cannot be read: its values are nested too deep") from exc
